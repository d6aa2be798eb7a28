"""Every metric, for outputs and targets of many shapes and dtypes, equals scikit-learn or is refused with a message.

RUNNERKIT_WRITE_METRICS_TABLE=1 writes the table of docs/metrics.md.
"""

import itertools
import math
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn import metrics as sk

from benchmarks.results import read_section, write_section
from runnerkit import dl, metrics
from runnerkit.metrics import class_indices
from tests.callbacks.stand_ins import evaluate

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
COMMAND = "RUNNERKIT_WRITE_METRICS_TABLE=1 pytest tests/metrics/test_output_shapes.py -k table"
NUM_SAMPLES, NUM_CLASSES = 12, 4
SHAPES = {"(N,)": (), "(N, 1)": (1,), "(N, 2)": (2,), "(N, C)": (NUM_CLASSES,)}
FLOATS = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}
DTYPES = {**FLOATS, "int64": torch.int64, "bool": torch.bool}
TARGET_DTYPES = {"int64": torch.int64, "uint8": torch.uint8, "bool": torch.bool, "float32": torch.float32}
AVERAGES = ("micro", "macro", "weighted")


def draw_outputs(shape, dtype):
    """Return logits, which are also the scale of thresholds here; of integers and bools class indices or decisions."""
    logits = torch.randn(NUM_SAMPLES, *SHAPES[shape], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (logits > 0).to(dtype) if dtype in (torch.int64, torch.bool) else logits.to(dtype)


def draw_targets(shape, of_outputs, dtype):
    """Return class indices (N,) or (N, 1), or with the dimensions of the outputs 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    if shape == "(N, C)":
        return torch.randint(0, 2, (NUM_SAMPLES, *SHAPES[of_outputs]), generator=generator).to(dtype)
    num_classes = 2 if dtype is torch.bool else max(2, *SHAPES[of_outputs], 0)
    return torch.randint(0, num_classes, (NUM_SAMPLES, *SHAPES[shape]), generator=generator).to(dtype)


def target_shapes(of_outputs):
    return ("(N,)", "(N, 1)") if of_outputs in ("(N,)", "(N, 1)") else ("(N,)", "(N, 1)", "(N, C)")


def as_numpy(tensor):
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


# The references: what scikit-learn makes of the same numbers in float64, None where that is not defined.


def predicted_classes(outputs, targets, threshold):
    """Return flat predicted and true classes."""
    targets = targets.astype(int)
    if outputs.size != targets.size:
        return outputs.argmax(1), targets.reshape(-1)
    if outputs.dtype.kind == "f":  # one score for each target
        return None if threshold is None else ((outputs > threshold).reshape(-1), targets.reshape(-1))
    return outputs.astype(int).reshape(-1), targets.reshape(-1)


def reference_accuracy(outputs, targets, *, threshold=None):
    pair = predicted_classes(outputs, targets, threshold)
    return pair and {"accuracy": sk.accuracy_score(*pair[::-1])}


def reference_confusion(outputs, targets, *, threshold=None):
    size = num_classes_of(outputs.shape, threshold)
    pair = predicted_classes(outputs, targets, threshold)
    if pair is None:
        return None
    counts = sk.confusion_matrix(*pair[::-1], labels=range(size))
    return {f"confusion_matrix/class_{i:02d}_as_class_{j:02d}": each for (i, j), each in np.ndenumerate(counts)}


def reference_f1(outputs, targets, *, threshold=None):
    pair = predicted_classes(outputs, targets, threshold)
    return pair and f1_values(pair[1], pair[0], labels=range(num_classes_of(outputs.shape, threshold)))


def num_classes_of(shape, threshold):
    return 2 if threshold is not None else max(2, *shape[1:], 0)


def reference_labels_f1(outputs, targets, *, threshold):
    if outputs.ndim != 2 or targets.shape != outputs.shape:
        return None
    right, predicted = targets > 0.5, outputs > threshold
    if outputs.shape[1] == 1:  # scikit-learn takes a column for two classes; here it is one label
        return f1_values(right[:, 0], predicted[:, 0], labels=[1])
    return f1_values(right, predicted, labels=None)


def f1_values(targets, predicted, *, labels):
    found = {}
    for average in AVERAGES:
        values = sk.precision_recall_fscore_support(targets, predicted, labels=labels, average=average, zero_division=0)
        found |= {f"{name}/_{average}": each for name, each in zip(("precision", "recall", "f1"), values, strict=False)}
    return found


def reference_labels_accuracy(outputs, targets, *, threshold):
    if outputs.ndim != 2 or targets.shape != outputs.shape:
        return None
    return {"accuracy": sk.accuracy_score((targets > 0.5).reshape(-1), (outputs > threshold).reshape(-1))}


def reference_auc(outputs, targets):
    if outputs.size == len(outputs):
        area = sk.roc_auc_score(targets.reshape(-1), outputs.reshape(-1))
        return {"auc": area, "auc/_micro": area, "auc/_weighted": area}
    one_hot = targets if targets.shape == outputs.shape else targets.reshape(-1, 1) == np.arange(outputs.shape[1])
    present = [index for index in range(outputs.shape[1]) if 0 < one_hot[:, index].sum() < len(one_hot)]
    areas = [sk.roc_auc_score(one_hot[:, index], outputs[:, index]) for index in present]
    return {
        "auc": np.mean(areas),
        "auc/_micro": sk.roc_auc_score(one_hot.reshape(-1), outputs.reshape(-1)),
        "auc/_weighted": np.average(areas, weights=[one_hot[:, index].sum() for index in present]),
    }


def reference_overlap(outputs, targets, *, score, name, threshold=None):
    if outputs.ndim != 2 or targets.shape != outputs.shape or (threshold is None and outputs.dtype.kind == "f"):
        return None  # logits are not a soft mask
    pair = targets > 0.5, outputs > (threshold or 0)
    classes = [score(*(each[:, index] for each in pair), zero_division=1) for index in range(outputs.shape[1])]
    return {name: np.mean(classes), f"{name}/_micro": score(*(each.reshape(-1) for each in pair), zero_division=1)}


def tversky(targets, predicted, *, zero_division):
    """Compute the index of alpha 0.3 from scikit-learn's counts."""
    _, false_alarms, misses, hits = sk.confusion_matrix(targets, predicted, labels=[0, 1]).ravel()
    total = hits + 0.7 * false_alarms + 0.3 * misses
    return hits / total if total else zero_division


def reference_r2(outputs, targets):
    outputs, targets = (each.astype(float).reshape(len(each), -1) for each in (outputs, targets))
    return {"r2squared": sk.r2_score(targets, outputs)} if outputs.shape == targets.shape else None


def reference_ranking(outputs, targets, *, name, of_row):
    if outputs.ndim != 2 or targets.shape != outputs.shape:
        return None
    values = []
    for scores, relevance in zip(outputs.astype(float), targets > 0.5, strict=True):
        ranks = np.argsort(np.argsort(-scores, kind="stable"))  # ties are broken by position
        values.append(of_row(relevance, ranks) if relevance.any() else 0.0)
    return {name: np.mean(values)}


def ndcg_of_row(relevance, ranks):
    if len(ranks) == 1:
        return 1.0  # scikit-learn refuses to rank one item
    return sk.ndcg_score(relevance[None].astype(float), -ranks[None].astype(float))


def classes_of(shape):
    return max(2, *SHAPES[shape], 0)


ZERO, SOME, HALF = {"threshold": 0}, {"threshold": 0.3}, {"threshold": 0.5}
JACCARD, F1 = {"score": sk.jaccard_score, "name": "iou"}, {"score": sk.f1_score, "name": "dice"}
INDEX = {"score": tversky, "name": "tversky", **ZERO}
HIT = {"name": "hitrate02", "of_row": lambda relevance, ranks: (ranks[relevance] < 2).mean()}
MRR = {"name": "mrr04", "of_row": lambda relevance, ranks: 1 / (1 + ranks[relevance].min())}
MAP = {"name": "map04", "of_row": lambda relevance, ranks: sk.average_precision_score(relevance, -ranks)}
NDCG = {"name": "ndcg04", "of_row": ndcg_of_row}
Confusion, F1Metric = metrics.ConfusionMatrixMetric, metrics.PrecisionRecallF1SupportMetric
Labels, LabelsF1 = metrics.MultilabelAccuracyMetric, metrics.MultilabelPrecisionRecallF1SupportMetric
# Names are those of the page's table: (function that makes the metric, its reference, the reference's arguments)
METRICS = {
    "AccuracyMetric()": (lambda _: metrics.AccuracyMetric(), reference_accuracy, {}),
    "AccuracyMetric(threshold=0)": (lambda _: metrics.AccuracyMetric(**ZERO), reference_accuracy, ZERO),
    "PrecisionRecallF1SupportMetric(C)": (lambda shape: F1Metric(classes_of(shape)), reference_f1, {}),
    "PrecisionRecallF1SupportMetric(threshold=0.3)": (lambda _: F1Metric(**SOME), reference_f1, SOME),
    "ConfusionMatrixMetric(C)": (lambda shape: Confusion(classes_of(shape)), reference_confusion, {}),
    "ConfusionMatrixMetric(2, threshold=0)": (lambda _: Confusion(2, **ZERO), reference_confusion, ZERO),
    "AUCMetric()": (lambda _: metrics.AUCMetric(), reference_auc, {}),
    "MultilabelAccuracyMetric()": (lambda _: Labels(), reference_labels_accuracy, HALF),
    "MultilabelPrecisionRecallF1SupportMetric(threshold=0)": (lambda _: LabelsF1(**ZERO), reference_labels_f1, ZERO),
    "IOUMetric(threshold=0)": (lambda _: metrics.IOUMetric(**ZERO), reference_overlap, ZERO | JACCARD),
    "IOUMetric()": (lambda _: metrics.IOUMetric(), reference_overlap, JACCARD),
    "DiceMetric(threshold=0)": (lambda _: metrics.DiceMetric(**ZERO), reference_overlap, ZERO | F1),
    "TverskyMetric(0.3, threshold=0)": (lambda _: metrics.TverskyMetric(0.3, **ZERO), reference_overlap, INDEX),
    "HitrateMetric(2)": (lambda _: metrics.HitrateMetric(2), reference_ranking, HIT),
    "MRRMetric(4)": (lambda _: metrics.MRRMetric(4), reference_ranking, MRR),
    "MAPMetric(4)": (lambda _: metrics.MAPMetric(4), reference_ranking, MAP),
    "NDCGMetric(4)": (lambda _: metrics.NDCGMetric(4), reference_ranking, NDCG),
    "R2Metric()": (lambda _: metrics.R2Metric(), reference_r2, {}),
}


@cache
def expected_values(name, shape, dtype, target_shape, target_dtype):
    """Compute the reference; it is the same for all targets of the same values."""
    _, reference, arguments = METRICS[name]
    outputs, targets = draw_outputs(shape, dtype), draw_targets(target_shape, shape, target_dtype)
    with config_context(skip_parameter_validation=True, assume_finite=True):  # a third faster
        return reference(as_numpy(outputs), as_numpy(targets), **arguments)


def values_of(metric, *batches):
    for batch in batches:
        metric.update(*batch)
    return metric.compute_key_value()


@cache
def outcome(name, shape, dtype, target_shape, target_dtype):
    """Return whether the metric has scikit-learn's values; False if it refuses the batch, in update or when read."""
    metric = METRICS[name][0](shape)
    outputs, targets = draw_outputs(shape, dtype), draw_targets(target_shape, shape, target_dtype)
    where = f"{name} of {shape} {dtype} and {target_shape} {target_dtype}"
    refusal = None
    try:
        found = values_of(metric, (outputs[:8], targets[:8]), (outputs[8:], targets[8:]))
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert refusal.startswith(("expected", "outputs", "threshold", "targets", "topk")), f"{where}: {refusal}"
        return False
    kind = torch.bool if target_dtype is torch.bool else torch.int64
    expected = expected_values(name, shape, dtype, target_shape, kind)
    assert expected is not None, f"{where} was not refused"
    assert {each: found[each] for each in expected} == pytest.approx(expected, rel=1e-12, abs=1e-12), where
    return True


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_equals_scikit_learn_or_is_refused(name):
    """Nothing in between, such as truncated probabilities; the dtypes of floats and targets make no difference."""
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        for target_shape in target_shapes(shape):
            found = {outcome(name, shape, DTYPES[dtype], target_shape, each) for each in TARGET_DTYPES.values()}
            assert len(found) == 1, f"{name} of {shape} {dtype} and {target_shape}"
            if dtype in FLOATS:
                assert found == {outcome(name, shape, torch.float32, target_shape, torch.int64)}


def test_the_table_of_the_page():
    """It lists the targets that each metric takes for outputs of each shape; the values were compared above."""
    rows = [f"| metric | outputs | {' | '.join(SHAPES)} |", "|---|---|---|---|---|---|"]
    for name in METRICS:
        dtypes_of: dict[tuple[str, ...], list[str]] = {}
        for dtype in DTYPES:
            cells = tuple(targets_taken(name, shape, DTYPES[dtype]) for shape in SHAPES)
            dtypes_of.setdefault(cells, []).append(dtype)
        rows += [f"| `{name}` | {', '.join(dtypes)} | {' | '.join(cells)} |" for cells, dtypes in dtypes_of.items()]
    table = "\n".join(rows)
    if os.environ.get("RUNNERKIT_WRITE_METRICS_TABLE"):
        write_section("output shapes", table, PAGE, command=COMMAND)

    assert read_section("output shapes", PAGE, command=COMMAND) == table


def targets_taken(name, shape, dtype):
    taken = [each for each in target_shapes(shape) if outcome(name, shape, dtype, each, torch.int64)]
    return ", ".join(shape if each == "(N, C)" else each for each in taken) or "refused"


BINARY = torch.tensor([0.9, 0.2, 0.6, 0.4, 0.7, 0.1])
TRUE = torch.tensor([1, 0, 0, 1, 1, 0])


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("are_logits", [False, True])
def test_callbacks_of_a_binary_classifier_take_a_threshold(column, are_logits):
    """0 for logits and 0.5 for probabilities give the same values, those of scikit-learn."""
    scores = BINARY.logit() if are_logits else BINARY
    threshold = 0 if are_logits else 0.5
    scores = scores[:, None] if column else scores
    batches = [{"x": scores[rows], "y": TRUE[rows]} for rows in (slice(4), slice(4, 6))]
    found = {}
    for callback in (
        dl.AccuracyCallback("x", "y", threshold=threshold),
        dl.PrecisionRecallF1SupportCallback("x", "y", threshold=threshold, compute_per_class_metrics=True),
        dl.ConfusionMatrixCallback("x", "y", class_names=["no", "yes"], threshold=threshold, log_counts=True),
        dl.AUCCallback("x", "y"),
    ):
        found |= evaluate(callback, batches).loader_metrics

    predicted = BINARY > 0.5
    counts = sk.confusion_matrix(TRUE, predicted).ravel()
    assert found["accuracy"] == sk.accuracy_score(TRUE, predicted)
    assert found["f1/class_01"] == pytest.approx(sk.f1_score(TRUE, predicted))
    assert found["f1/_weighted"] == pytest.approx(sk.f1_score(TRUE, predicted, average="weighted"))
    assert [found[f"confusion_matrix/{a}_as_{b}"] for a in ("no", "yes") for b in ("no", "yes")] == counts.tolist()
    assert found["auc"] == pytest.approx(sk.roc_auc_score(TRUE, BINARY))


EYE = torch.eye(6)
NAN = torch.full((6, 6), torch.nan)


@pytest.mark.parametrize(
    ("make", "outputs", "targets", "message"),
    [
        (metrics.AccuracyMetric, BINARY, TRUE, r"one score per target: pass threshold=0 if they are logits"),
        (metrics.AccuracyMetric, BINARY[:, None], TRUE, r"threshold=0.5 if they are probabilities"),
        (lambda: F1Metric(2), BINARY, TRUE, r"pass threshold=0 .* integer dtype"),
        (lambda: Confusion(2), BINARY, TRUE, r"outputs \(6,\) of torch.float32 .* pass threshold=0"),
        (lambda: metrics.AccuracyMetric(threshold=0), EYE, TRUE, r"threshold=0 is for one score per target"),
        (lambda: metrics.AccuracyMetric(2, threshold=0), BINARY, TRUE, r"topk must be 1 for one output per row"),
        (lambda: Confusion(3, threshold=0), BINARY, TRUE, r"outputs have 2 classes, num_classes is 3"),
        (lambda: Confusion(6), EYE, TRUE + 0.5, r"targets must be class indices .* fractions"),
        (lambda: Confusion(2, threshold=0), BINARY, TRUE * 2, r"class indices in \[0, 2\), got 0 to 2"),
        (metrics.AUCMetric, BINARY, TRUE * 2, r"targets must be in \[0, 1\], got 0 to 2"),
        (metrics.AUCMetric, EYE, TRUE + 0.5, r"targets must be class indices .* fractions"),
        (Labels, EYE, -EYE, r"targets must be in .* got -1 to -?0"),
        (LabelsF1, EYE, NAN, r"targets must be in .* got nan to nan"),
        (Labels, BINARY, TRUE, r"one score or class index per sample is for the metrics without"),
        (metrics.DiceMetric, EYE * 3, EYE, r"outputs must be in \[0, 1\], .* pass threshold=0"),
        (metrics.IOUMetric, EYE, EYE * 255, r"targets must be in \[0, 1\], got 0 to 255"),
        (metrics.R2Metric, torch.ones(2, 3, 4), torch.ones(2, 4, 3), r"expected outputs and targets"),
    ],
)
def test_what_could_be_a_mistake_is_refused(make, outputs, targets, message):
    """The error says what to write; at the latest when values are read."""
    with pytest.raises(ValueError, match=message):
        values_of(make(), (outputs, targets))


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "message"),
    [
        (metrics.ConfusionMatrixMetric(2, threshold=0), BINARY, TRUE * 0.9, r"3 targets are outside of \[0, 2\)"),
        (metrics.MultilabelAccuracyMetric(), torch.eye(2), torch.eye(2) * torch.nan, "got 4 values outside"),
        (metrics.MultilabelPrecisionRecallF1SupportMetric(), torch.eye(2), -torch.eye(2), "targets .* got 2 values"),
        (metrics.IOUMetric(threshold=0), torch.eye(2), torch.eye(2) * 255, "targets .* got 2 values"),
        (metrics.IOUMetric(), torch.eye(2) * 3, torch.eye(2), "outputs .* got 2 values"),
        (metrics.MRRMetric(), torch.eye(2), -torch.eye(2), "2 relevances are negative or NaN"),
    ],
)
def test_they_are_counted_where_reading_costs(monkeypatch, metric, outputs, targets, message):
    """On a GPU, the error is raised when values are read."""
    monkeypatch.setattr(class_indices, "_FREE_TO_READ", frozenset())
    metric.update(outputs, targets)

    with pytest.raises(ValueError, match=message):
        metric.compute_key_value()


def test_outputs_that_are_not_finite_make_a_soft_overlap_nan(monkeypatch):
    """They are a matter of `non_finite`, also on a GPU."""
    for free in ({"cpu"}, ()):
        monkeypatch.setattr(class_indices, "_FREE_TO_READ", frozenset(free))
        found = values_of(metrics.IOUMetric(), (torch.eye(2) * torch.nan, torch.eye(2)))
        assert all(math.isnan(each) for each in found.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_thresholds_of_half_precision_scores_are_not_rounded(dtype):
    """0.3 as bf16 is 0.30078125, which is above 0.3."""
    scores, targets = torch.tensor([[0.3]]).to(dtype), torch.tensor([[1]])
    expected = float(scores.double() > 0.3)

    for metric in (metrics.AccuracyMetric(threshold=0.3), metrics.MultilabelAccuracyMetric(0.3)):
        metric.update(scores, targets)
        assert metric.compute_key_value()["accuracy"] == expected
    assert float(metrics.iou(scores, targets, threshold=0.3)) == expected


def test_function_forms_take_a_threshold():
    scores, predicted = BINARY[:, None], BINARY > 0.5

    assert float(metrics.accuracy(scores, TRUE, threshold=0.5)[0]) == sk.accuracy_score(TRUE, predicted)
    found = metrics.precision_recall_fbeta_support(scores, TRUE, threshold=0.5)
    expected = sk.precision_recall_fscore_support(TRUE, predicted)
    assert [each.tolist() for each in found] == [pytest.approx(each.tolist()) for each in expected]
