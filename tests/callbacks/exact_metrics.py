"""Each metric callback, paired with scikit-learn's result or that of a plain float64 loop over all samples at once."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from sklearn import metrics as sk
from torch import Tensor

from runnerkit import dl

NUM_CLASSES, NUM_ITEMS = 4, 7
CLASSES = range(NUM_CLASSES)
Samples = dict[str, Tensor]


def make_samples(num_samples: int, *, seed: int, dtype: torch.dtype = torch.float32) -> Samples:
    """Draw one row per sample for every input that the callbacks below read."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_samples, *shape, generator=generator, dtype=dtype)

    classes = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
    return {
        "logits": normal(NUM_CLASSES),
        "classes": classes,
        "labels": (normal(NUM_CLASSES) > 0.5).to(dtype),
        "scores": normal(NUM_CLASSES).sigmoid(),
        "coarse": (4 * normal().sigmoid()).round() / 4,  # has ties
        "column": normal(1),  # output of a model with one output
        "binary": (normal() > 0).long(),
        "values": normal(2) + 3,
        "near_values": normal(2) + 3,
        "item_scores": normal(NUM_ITEMS),
        "items": (normal(NUM_ITEMS) > 0.8).long(),
        "masks": normal(NUM_CLASSES, 3, 3).sigmoid(),
        "target_masks": (normal(NUM_CLASSES, 3, 3) > 0.7).to(dtype),
        "embeddings": normal(3),
        "is_query": torch.arange(num_samples) % 3 == 0,
    }


def as_numpy(samples: Samples) -> dict[str, np.ndarray]:
    return {key: each.double().numpy() if each.is_floating_point() else each.numpy() for key, each in samples.items()}


def averages(name: str, of_classes: np.ndarray, micro: float) -> dict[str, float]:
    by_class = {f"{name}/class_{index:02d}": value for index, value in enumerate(of_classes)}
    return {name: of_classes.mean(), f"{name}/_macro": of_classes.mean(), f"{name}/_micro": micro, **by_class}


def accuracy(x: dict[str, np.ndarray]) -> dict[str, float]:
    names = {"accuracy": 1, "accuracy03": 3}
    return {name: sk.top_k_accuracy_score(x["classes"], x["logits"], k=k, labels=CLASSES) for name, k in names.items()}


def precision_recall(true: np.ndarray, predicted: np.ndarray, prefix: str) -> dict[str, float]:
    expected = {}
    for average in ("micro", "macro", "weighted"):
        scores = sk.precision_recall_fscore_support(true, predicted, labels=CLASSES, average=average, zero_division=0)
        expected |= {f"{prefix}{n}/_{average}": s for n, s in zip(("precision", "recall", "f1"), scores, strict=False)}
    of_classes = sk.precision_recall_fscore_support(true, predicted, labels=CLASSES, average=None, zero_division=0)
    for name, values in zip(("precision", "recall", "f1", "support"), of_classes, strict=True):
        expected |= {f"{prefix}{name}/class_{index:02d}": value for index, value in enumerate(values)}
    return expected


def area(true: np.ndarray, scores: np.ndarray) -> float:
    return sk.roc_auc_score(true, scores) if 0 < true.sum() < len(true) else float("nan")


def auc(true: np.ndarray, scores: np.ndarray, prefix: str = "") -> dict[str, float]:
    of_classes = np.array([area(true[:, index], scores[:, index]) for index in range(true.shape[1])])
    known = ~np.isnan(of_classes)
    support = true.sum(axis=0)[known]
    expected = averages("auc", of_classes, area(true.ravel(), scores.ravel()))
    expected["auc"] = expected["auc/_macro"] = of_classes[known].mean() if known.any() else float("nan")
    expected["auc/_weighted"] = (of_classes[known] * support).sum() / support.sum() if support.sum() else float("nan")
    return {prefix + name: value for name, value in expected.items()}


def r2(x: dict[str, np.ndarray]) -> dict[str, float]:
    few = len(x["values"]) < 2
    return {"r2squared": float("nan") if few else sk.r2_score(x["values"], x["near_values"])}


def confusion(x: dict[str, np.ndarray]) -> dict[str, float]:
    counts = sk.confusion_matrix(x["classes"], x["logits"].argmax(axis=1), labels=CLASSES)
    return {f"confusion_matrix/class_{t:02d}_as_class_{p:02d}": counts[t, p] for t in CLASSES for p in CLASSES}


def ranking(x: dict[str, np.ndarray], k: int) -> dict[str, float]:
    hit, mrr, precision = [], [], []
    for scores, relevant in zip(x["item_scores"], x["items"], strict=True):
        order = [relevant[index] for index in sorted(range(NUM_ITEMS), key=lambda index: -scores[index])]
        places = [place for place, is_relevant in enumerate(order, start=1) if is_relevant and place <= k]
        hit.append(len(places) / relevant.sum() if relevant.any() else 0.0)
        mrr.append(1 / places[0] if places else 0.0)
        precision.append(np.mean([number / place for number, place in enumerate(places, start=1)]) if places else 0.0)
    ndcg = sk.ndcg_score(x["items"], x["item_scores"], k=k, ignore_ties=True)
    means = {"hitrate": np.mean(hit), "mrr": np.mean(mrr), "map": np.mean(precision), "ndcg": ndcg}
    return {f"{name}{k:02d}": value for name, value in means.items()}


def overlap(name: str, outputs: np.ndarray, targets: np.ndarray, *, alpha: float, beta: float) -> dict[str, float]:
    """Compute Tversky's index: IoU for alpha = beta = 1, Dice for 1/2."""

    def index(axes: tuple[int, ...]) -> np.ndarray:
        hits = (outputs * targets).sum(axis=axes)
        rest = beta * (outputs * (1 - targets)).sum(axis=axes) + alpha * (targets * (1 - outputs)).sum(axis=axes)
        return np.where(hits + rest == 0, 1.0, hits / np.where(hits + rest == 0, 1.0, hits + rest))

    return averages(name, index((0, 2, 3)), float(index((0, 1, 2, 3))))


def cmc(x: dict[str, np.ndarray], k: int) -> dict[str, float]:
    query, gallery = np.flatnonzero(x["is_query"]), np.flatnonzero(~x["is_query"])
    found = []
    for each in query:
        distance = np.sqrt(((x["embeddings"][gallery] - x["embeddings"][each]) ** 2).sum(axis=1))
        nearest = gallery[np.argsort(distance)[:k]]
        found.append(bool((x["classes"][nearest] == x["classes"][each]).any()))
    return {f"cmc{k:02d}": np.mean(found)}


def hard(x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return (x["masks"] > 0.4).astype(float), x["target_masks"]


one_hot = np.eye(NUM_CLASSES)
items = ("item_scores", "items")
masks = ("masks", "target_masks")

# {name: (function that makes the callback, function that computes its expected metrics)}
CASES: dict[str, tuple[Callable[[], dl.IMetricCallback], Callable[[dict[str, np.ndarray]], dict[str, float]]]] = {
    "accuracy": (lambda: dl.AccuracyCallback("logits", "classes", topk=(1, 3)), accuracy),
    "accuracy, loader only": (
        lambda: dl.AccuracyCallback("logits", "classes", topk=(1, 3), log_on_batch=False, prefix="late_"),
        lambda x: {f"late_{name}": value for name, value in accuracy(x).items()},
    ),
    "f1": (
        lambda: dl.PrecisionRecallF1SupportCallback("logits", "classes", compute_per_class_metrics=True),
        lambda x: precision_recall(x["classes"], x["logits"].argmax(axis=1), ""),
    ),
    "multilabel f1": (
        lambda: dl.MultilabelPrecisionRecallF1SupportCallback(
            "scores", "labels", threshold=0.4, compute_per_class_metrics=True, prefix="many_"
        ),
        lambda x: precision_recall(x["labels"].astype(int), (x["scores"] > np.float32(0.4)).astype(int), "many_"),
    ),
    "multilabel accuracy": (
        lambda: dl.MultilabelAccuracyCallback("scores", "labels", prefix="many_", suffix="_all"),
        lambda x: {"many_accuracy_all": np.mean((x["scores"] > 0.5) == (x["labels"] > 0.5))},
    ),
    "auc of classes": (
        lambda: dl.AUCCallback("logits", "classes", compute_per_class_metrics=True),
        lambda x: auc(one_hot[x["classes"]], x["logits"]),
    ),
    "auc of labels": (
        lambda: dl.AUCCallback("scores", "labels", compute_per_class_metrics=True, prefix="many_"),
        lambda x: auc(x["labels"], x["scores"], "many_"),
    ),
    "auc with ties": (
        lambda: dl.AUCCallback("coarse", "binary", prefix="two_", compute_per_class_metrics=True),
        lambda x: auc(x["binary"][:, None], x["coarse"][:, None], "two_"),
    ),
    "auc of two classes": (
        lambda: dl.AUCCallback("column", "binary", prefix="column_", compute_per_class_metrics=True),
        lambda x: auc(x["binary"][:, None], x["column"], "column_"),
    ),
    "confusion": (
        lambda: dl.ConfusionMatrixCallback("logits", "classes", num_classes=NUM_CLASSES, log_counts=True),
        confusion,
    ),
    "r2": (lambda: dl.R2SquaredCallback("near_values", "values"), r2),
    "hitrate": (lambda: dl.HitrateCallback(*items, topk=(1, 3)), lambda x: pick(x, "hitrate")),
    "mrr": (lambda: dl.MRRCallback(*items, topk=(1, 3)), lambda x: pick(x, "mrr")),
    "map": (lambda: dl.MAPCallback(*items, topk=(1, 3)), lambda x: pick(x, "map")),
    "ndcg": (lambda: dl.NDCGCallback(*items, topk=(1, 3)), lambda x: pick(x, "ndcg")),
    "iou": (
        lambda: dl.IOUCallback(*masks, threshold=0.4, compute_per_class_metrics=True),
        lambda x: overlap("iou", *hard(x), alpha=1, beta=1),
    ),
    "soft dice": (
        lambda: dl.DiceCallback(*masks, compute_per_class_metrics=True),
        lambda x: overlap("dice", x["masks"], x["target_masks"], alpha=0.5, beta=0.5),
    ),
    "tversky": (
        lambda: dl.TverskyCallback(*masks, alpha=0.2, threshold=0.4, compute_per_class_metrics=True),
        lambda x: overlap("tversky", *hard(x), alpha=0.2, beta=0.8),
    ),
    "cmc": (lambda: dl.CMCScoreCallback("embeddings", "classes", "is_query", topk=3), lambda x: cmc(x, 3)),
}


def pick(x: dict[str, np.ndarray], name: str) -> dict[str, float]:
    values = ranking(x, 1) | ranking(x, 3)
    return {f"{name}{k:02d}": values[f"{name}{k:02d}"] for k in (1, 3)}


def expected_of(samples: Samples, cases: Iterable[str] = CASES) -> dict[str, float]:
    """Compute everything that the callbacks of `cases` log for these samples, in any batches."""
    x = as_numpy(samples)
    return {name: float(value) for case in cases for name, value in CASES[case][1](x).items()}
