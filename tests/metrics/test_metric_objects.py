"""Metric objects and functions, used without a runner, against scikit-learn and torchmetrics."""

import math
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from runnerkit import metrics

NUM_CLASSES = 4
EXACT = {"rel": 1e-9, "abs": 1e-9}


def by_class(targets):
    return torch.nn.functional.one_hot(targets, NUM_CLASSES)


def expected_values(logits, targets):
    """Compute the values of all metrics by scikit-learn, in float64."""
    scores, classes, predicted = logits.numpy(), targets.numpy(), logits.argmax(1).numpy()
    labels, one_hot = list(range(NUM_CLASSES)), by_class(targets).numpy()
    found = {"accuracy01": sk.accuracy_score(classes, predicted)}
    found["accuracy02"] = sk.top_k_accuracy_score(classes, scores, k=2, labels=labels)
    for average in ("micro", "macro", "weighted"):
        values = sk.precision_recall_fscore_support(classes, predicted, labels=labels, average=average, zero_division=0)
        found |= {f"{name}/_{average}": each for name, each in zip(("precision", "recall", "f1"), values, strict=False)}
        found[f"labels_f1/_{average}"] = sk.f1_score(one_hot, scores > 0.5, average=average, zero_division=0)
    present = [each for each in labels if 0 < (classes == each).sum() < len(classes)]
    areas = {each: sk.roc_auc_score(classes == each, scores[:, each]) for each in present}
    found["auc"] = np.mean(list(areas.values())) if areas else math.nan
    found["auc/_micro"] = sk.roc_auc_score(one_hot.reshape(-1), scores.reshape(-1))
    found["labels_accuracy"] = ((scores > 0.5) == one_hot).mean()
    found["iou/_micro"] = sk.jaccard_score(one_hot, scores > 0.5, average="micro", zero_division=1)
    found["dice/_micro"] = sk.f1_score(one_hot, scores > 0.5, average="micro", zero_division=1)
    found["mrr04"] = sk.label_ranking_average_precision_score(one_hot, scores)  # one relevant item in each row
    found["map04"] = found["mrr04"]
    found["ndcg04"] = sk.ndcg_score(one_hot, scores, k=4)
    found["hitrate02"] = found["accuracy02"]
    found["r2squared"] = sk.r2_score(classes, scores[:, 0]) if len(classes) > 1 else math.nan
    matrix = sk.confusion_matrix(classes, predicted, labels=labels)
    return found | {f"cm/{row}_as_{column}": matrix[row, column] for row in labels for column in labels}


def all_metrics():
    """Return metrics, and the function that gives their inputs."""
    both = {
        metrics.AccuracyMetric((1, 2)): lambda x, y: (x, y),
        metrics.PrecisionRecallF1SupportMetric(): lambda x, y: (x, y),
        metrics.ConfusionMatrixMetric(class_names=["0", "1", "2", "3"], prefix="cm"): lambda x, y: (x, y),
        metrics.AUCMetric(): lambda x, y: (x, y),
        metrics.R2Metric(): lambda x, y: (x[:, 0], y),
    }
    labels = [
        metrics.MultilabelAccuracyMetric(prefix="labels_"),
        metrics.MultilabelPrecisionRecallF1SupportMetric(prefix="labels_"),
        metrics.IOUMetric(threshold=0.5),
        metrics.DiceMetric(threshold=0.5),
        metrics.HitrateMetric(2),
        metrics.MRRMetric(4),
        metrics.MAPMetric(4),
        metrics.NDCGMetric(4),
    ]
    return both | {each: lambda x, y: (x, by_class(y)) for each in labels}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4).filter(
        lambda each: sum(map(sum, each))
    ),
)
def test_merged_metrics_of_processes_equal_scikit_learn(seed, sizes):
    """Whatever batches one to four processes have, even none or empty ones, the merged value is that of all samples."""
    generator = torch.Generator().manual_seed(seed)
    flat = list(chain.from_iterable(sizes))
    logits = torch.rand(sum(flat), NUM_CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, NUM_CLASSES, (sum(flat),), generator=generator)

    found = {}
    for metric, inputs in all_metrics().items():
        batches = zip(logits.split(flat), targets.split(flat), strict=True)
        of_processes = []
        for of_process in sizes:
            of_processes.append(metric.copy())
            for batch in islice(batches, len(of_process)):
                of_processes[-1].update(*inputs(*batch))
        of_processes[0].merge(*of_processes[1:])
        found |= of_processes[0].compute_key_value()

    expected = expected_values(logits, targets)
    assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True, **EXACT)


@pytest.mark.parametrize("metric", all_metrics(), ids=lambda metric: type(metric).__name__)
def test_metrics_start_again_and_copy(metric):
    """After a reset, and in a copy, there are no samples: all values are NaN."""
    inputs = all_metrics_inputs(metric)
    metric.update(*inputs)
    other = metric.copy()

    values = metric.compute_key_value()
    metric.reset()

    assert tuple(values) == metric.names and not any(math.isnan(each) for each in values.values())
    for each in (metric, other):
        empty = each.compute_key_value()
        assert tuple(empty) == each.names and all(math.isnan(value) for value in empty.values())


def all_metrics_inputs(metric):
    logits, targets = torch.eye(4), torch.arange(4)
    make = next(inputs for each, inputs in all_metrics().items() if type(each) is type(metric))
    return make(logits, targets)


def test_functions_equal_scikit_learn():
    """The functional forms have the values of each class that scikit-learn computes."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(50, NUM_CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, NUM_CLASSES, (50,), generator=generator)
    one_hot, classes, predicted = by_class(targets), targets.numpy(), logits.argmax(1).numpy()

    found = metrics.precision_recall_fbeta_support(logits, targets, beta=2)
    expected = sk.precision_recall_fscore_support(classes, predicted, beta=2, labels=range(NUM_CLASSES))
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(each.numpy(), other, rtol=1e-12)
    areas = [sk.roc_auc_score(classes == each, logits[:, each]) for each in range(NUM_CLASSES)]
    np.testing.assert_allclose(metrics.auc(logits, targets), areas, rtol=1e-12)
    masks = logits > 0.5
    np.testing.assert_allclose(
        metrics.iou(logits, one_hot, threshold=0.5), sk.jaccard_score(one_hot, masks, average=None), rtol=1e-12
    )
    np.testing.assert_allclose(
        metrics.dice(logits, one_hot, threshold=0.5), sk.f1_score(one_hot, masks, average=None), rtol=1e-12
    )
    assert metrics.r2(logits[:, 0], targets).item() == pytest.approx(sk.r2_score(classes, logits[:, 0]), rel=1e-12)
    precisions = [sk.average_precision_score(row, score) for row, score in zip(one_hot, logits, strict=True)]
    np.testing.assert_allclose(metrics.average_precision(logits, one_hot, k=4), precisions, rtol=1e-12)
    assert metrics.map_score(logits, one_hot, [4])[0].item() == pytest.approx(np.mean(precisions), rel=1e-12)
    assert metrics.ndcg(logits, one_hot, [2])[0].item() == pytest.approx(sk.ndcg_score(one_hot, logits, k=2))
    top = sk.top_k_accuracy_score(classes, logits, k=2)
    assert metrics.hitrate(logits, one_hot, [2])[0].item() == metrics.accuracy(logits, targets, (2,))[0].item() == top
    nearest = torch.cdist(logits[:20], logits[20:]).argmin(1)
    is_match = targets[:20, None] == targets[20:]
    hits = is_match[torch.arange(20), nearest].double().mean()
    assert metrics.cmc_score(logits[:20], logits[20:], is_match) == hits


def test_additive_metrics_merge():
    """The mean and the standard deviation of merged metrics are those of all values."""
    metric, other, empty = metrics.AdditiveMetric(), metrics.AdditiveMetric(), metrics.AdditiveMetric()
    values = [1.0, 4.0, 2.5, 8.0]
    other.update(0.0, 0)  # an empty batch changes nothing
    for each in values[:1]:
        metric.update(each, 1)
    for each in values[1:]:
        other.update(each, 1)

    metric.merge(empty, other)

    assert metric.compute_key_value() == pytest.approx({"mean": np.mean(values), "std": np.std(values, ddof=1)})


def test_a_sum_with_a_graph_is_refused():
    """A metric that keeps the autograd graph of a batch would keep all of them in memory."""

    class Total(metrics.SumsMetric):
        def count(self, values):
            return {"total": values.sum()}

        def values(self, sums):
            return sums

    with pytest.raises(ValueError, match=r"Total\.count returned 'total' with an autograd graph"):
        Total(["total"]).update(torch.ones(2, requires_grad=True))


def test_wrong_arguments_of_metrics_are_named():
    """Metrics of different classes or arguments are not merged, and wrong shapes are given in the message."""
    metric = metrics.ConfusionMatrixMetric(3)
    with pytest.raises(ValueError, match=r"ConfusionMatrixMetric of .* cannot be merged with AccuracyMetric of"):
        metric.merge(metrics.AccuracyMetric())
    with pytest.raises(ValueError, match="make both with the same arguments"):
        metric.merge(metrics.ConfusionMatrixMetric(4))
    with pytest.raises(ValueError, match=r"expected scores and targets \(N,\), got \(3,\) and \(4,\)"):
        metrics.roc_curve(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="max_points must be >= 2 or None, got 1"):
        metrics.roc_curve(torch.zeros(3), torch.zeros(3), max_points=1)
    with pytest.raises(ValueError, match="num_samples must be >= 0, got -1"):
        metrics.AdditiveMetric().update(1.0, -1)
