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
from tests.callbacks.exact_metrics import CASES, expected_of, make_samples

NUM_CLASSES = 4
NAMES = [name for name in CASES if name != "cmc"]  # which is undefined without queries or without a gallery
EXACT = {"rel": 1e-9, "abs": 1e-9}


SIZES = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), sizes=SIZES.filter(lambda sizes: sum(chain(*sizes))))
def test_merged_metrics_of_processes_equal_scikit_learn(seed, sizes):
    """Whatever batches one to four processes have, even none or empty ones, the merged value is that of all samples."""
    flat = list(chain.from_iterable(sizes))
    samples = make_samples(sum(flat), seed=seed, dtype=torch.float64)

    found = {}
    for name in NAMES:
        callback, of_processes = CASES[name][0](), []
        batches = zip(*(samples[key].split(flat) for key in callback.keys.values()), strict=True)
        for of_process in sizes:
            of_processes.append(callback.metric.copy())
            for batch in islice(batches, len(of_process)):
                of_processes[-1].update(*batch)
        of_processes[0].merge(*of_processes[1:])
        found |= callback.values(of_processes[0])

    expected = expected_of(samples, NAMES)
    assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True, **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_start_again_and_copy(name):
    """After a reset, and in a copy, there are no samples: all values are NaN."""
    callback, samples = CASES[name][0](), make_samples(40, seed=0)
    metric = callback.metric.copy()
    metric.update(*(samples[key] for key in callback.keys.values()))
    other = metric.copy()

    values = metric.compute_key_value()
    metric.reset()

    assert not any(math.isnan(each) for each in values.values())
    assert tuple(name for name in values if "/class_" not in name or name in metric.names) == metric.names
    for each in (metric, other):
        empty = each.compute_key_value()
        assert {*each.names} <= empty.keys() and all(math.isnan(value) for value in empty.values())


def test_functions_equal_scikit_learn():
    """The functional forms have the values of each class that scikit-learn computes."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(50, NUM_CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, NUM_CLASSES, (50,), generator=generator)
    one_hot, classes, predicted = torch.nn.functional.one_hot(targets), targets.numpy(), logits.argmax(1).numpy()

    found = metrics.precision_recall_fbeta_support(logits, targets, beta=2)
    expected = sk.precision_recall_fscore_support(classes, predicted, beta=2, labels=range(NUM_CLASSES))
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(each.numpy(), other, rtol=1e-12)
    areas = [sk.roc_auc_score(classes == each, logits[:, each]) for each in range(NUM_CLASSES)]
    np.testing.assert_allclose(metrics.auc(logits, targets), areas, rtol=1e-12)
    for metric, reference in ((metrics.iou, sk.jaccard_score), (metrics.dice, sk.f1_score)):
        expected = reference(one_hot, logits > 0.5, average=None)
        np.testing.assert_allclose(metric(logits, one_hot, threshold=0.5), expected, rtol=1e-12)
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


CONFUSION = metrics.ConfusionMatrixMetric(3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CONFUSION.merge(metrics.AccuracyMetric()), "of .* cannot be merged with AccuracyMetric of"),
        (lambda: CONFUSION.merge(metrics.ConfusionMatrixMetric(4)), "make both with the same arguments"),
        (lambda: metrics.roc_curve(torch.zeros(3), torch.zeros(4)), r"\(N,\), got \(3,\) and \(4,\)"),
        (lambda: metrics.roc_curve(torch.zeros(3), torch.zeros(3), max_points=1), "max_points must be >= 2 .* got 1"),
        (lambda: metrics.AdditiveMetric().update(1.0, -1), "num_samples must be >= 0, got -1"),
    ],
)
def test_wrong_arguments_of_metrics_are_named(make, words):
    """Metrics of different classes or arguments are not merged, and wrong shapes are given in the message."""
    with pytest.raises(ValueError, match=words):
        make()
