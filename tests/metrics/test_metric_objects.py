"""Metric objects and functions, used without a runner, against scikit-learn and torchmetrics."""

import math
from itertools import chain, islice, product

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


@pytest.mark.parametrize("name", ["accuracy", "multilabel accuracy", "hitrate", "mrr", "map", "ndcg"])
def test_a_fraction_of_no_rows_is_nan(name):
    """A loader whose only batches are empty does not have a value, like one without batches: 0 would be the worst."""
    callback, samples = CASES[name][0](), make_samples(4, seed=0)
    metric, batch = callback.metric.copy(), [samples[key] for key in callback.keys.values()]

    of_batch = metric.update_key_value(*(each[:0] for each in batch))
    empty = metric.compute_key_value()
    metric.update(*batch)

    assert all(math.isnan(each) for each in [*of_batch.values(), *empty.values()]) and {*empty} == {*metric.names}
    assert not any(math.isnan(each) for each in metric.compute_key_value().values())
    assert all(each.isnan() for each in metrics.accuracy(torch.ones(0, 3), torch.ones(0, dtype=torch.int64)))


def test_r2_of_batches_is_computed_from_one_pass():
    """A batch's own value is exact whatever came before it, and its targets are summed once."""
    metric, other = metrics.R2Metric(), metrics.R2Metric()
    generator = torch.Generator().manual_seed(0)
    targets = [torch.tensor([1e9, 2e9]), torch.full((3,), 0.1), torch.randn(5, generator=generator)]
    targets = [each.double() for each in targets]
    calls = []

    class Counted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(function.__name__)
            return function(*args, **(kwargs or {}))

    for each in targets:
        with Counted():
            value = metric.update_key_value(each + 1, each)
        other.update(each + 1, each)
        assert value["r2squared"].item() == pytest.approx(sk.r2_score(each, each + 1), rel=1e-12)

    assert calls.count("square") == 3 * 3  # for each batch the sums of targets and of errors, and its value
    assert metric.compute() == pytest.approx(other.compute(), rel=1e-12)


def test_a_large_confusion_matrix_is_read_at_once():
    """A tensor for each of a million counts took 41 s."""
    metric = metrics.ConfusionMatrixMetric(1000)
    metric.update(torch.tensor([0, 1, 1, 999]), torch.tensor([0, 1, 0, 999]))

    with torch.profiler.profile() as profile:
        values = metric.compute_key_value()

    assert sum(each.count for each in profile.key_averages()) < 100
    found = {name: value for name, value in values.items() if value}
    pairs = ("00_as_class_00", "00_as_class_01", "01_as_class_01", "999_as_class_999")
    assert found == {f"confusion_matrix/class_{each}": 1.0 for each in pairs} and len(values) == 10**6
    assert isinstance(values["confusion_matrix/class_05_as_class_05"], float)


@pytest.mark.parametrize(
    ("metric", "batch"),
    [
        (metrics.IOUMetric(), lambda size: [torch.ones(2, size), torch.ones(2, size)]),
        (metrics.PrecisionRecallF1SupportMetric(), lambda size: [torch.eye(size + 1), torch.arange(size + 1)]),
        (metrics.MultilabelPrecisionRecallF1SupportMetric(), lambda size: [torch.ones(2, size), torch.ones(2, size)]),
        (metrics.R2Metric(), lambda size: [torch.ones(2, size), torch.ones(2, size)]),
        (metrics.AUCMetric(), lambda size: [torch.ones(2, size), torch.ones(2, size)]),
        (metrics.CMCMetric(), lambda size: [torch.ones(2, size), torch.tensor([0, 0]), torch.tensor([0, 1])]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_batches_of_other_classes_are_refused(metric, batch):
    """Sums of one class would be added to those of each of several, without an error."""
    words = f"{type(metric).__name__}: batches must have the same number of classes"
    adds = (
        lambda each, size: each.update(*batch(size)),
        lambda each, size: each.update_key_value(*batch(size)),
        lambda each, size: each.merge(with_batch(size)),
    )

    def with_batch(size):
        made = metric.copy()
        made.update(*batch(size))
        return made

    def value_after(add, first, second):
        made = with_batch(first)
        add(made, second)
        return made.compute()  # a metric that keeps its samples compares them here

    for (first, second), add in product(((3, 1), (1, 3)), adds):
        with pytest.raises(ValueError, match=words):
            value_after(add, first, second)


def test_scores_that_are_nan_have_no_rank():
    """A model that has diverged would score 1 where the relevant items, or the matches, come first."""
    scores, relevances = torch.full((2, 3), math.nan), torch.tensor([[1, 0, 0], [1, 0, 0]])
    functions = (metrics.hitrate, metrics.mrr, metrics.map_score, metrics.ndcg)

    values = [function(scores, relevances, [2])[0] for function in functions]
    values += [metrics.average_precision(scores, relevances, 2)[0]]
    values += [metrics.cmc_score(scores, torch.ones(2, 3), torch.eye(2))]
    values += [metrics.cmc_score(torch.ones(2, 3), torch.cat([scores[:1], torch.ones(1, 3)]), torch.eye(2))]

    assert all(each.isnan() for each in values)


def test_mistakes_in_metrics_of_users_are_named():
    """A name instead of a list would become names of one letter, and a tensor its rows."""

    class Rows(metrics.SamplesMetric):
        def columns(self, values):
            return values

        def values(self, *columns):
            return {"rows": columns[0].mean()}

    with pytest.raises(TypeError, match="Rows: names must be a list of str, got 'rows'"):
        Rows("rows")
    with pytest.raises(TypeError, match=r"Rows\.columns must return a list of tensors"):
        Rows(["rows"]).update(torch.ones(2, 2))


def test_additive_metrics_merge():
    """The mean and the standard deviation of merged metrics are those of all values."""
    metric, other, empty = metrics.AdditiveMetric(), metrics.AdditiveMetric(mode="torch"), metrics.AdditiveMetric()
    values = [1.0, 4.0, 2.5, 8.0]
    other.update(0.0, 0)  # an empty batch changes nothing
    for each in values[:1]:
        metric.update(torch.tensor(each, requires_grad=True), 1)
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
        (lambda: metrics.roc_curve(torch.zeros(2), torch.tensor([0, 2])), r"targets must be in \[0, 1\], got 0 to 2"),
        (lambda: metrics.ConfusionMatrixMetric(class_names=["a", "a"]), "class_names must differ"),
        (lambda: metrics.IOUMetric(class_names=["a", "a"]), "class_names must differ"),
        (
            lambda: metrics.average_precision(torch.ones(1, 3), torch.ones(1, 3), -1),
            "average_precision: topk .* got -1",
        ),
        (
            lambda: metrics.cmc_score(torch.ones(1, 2), torch.ones(0, 2), torch.ones(1, 0)),
            r"gallery \(G, 2\) .* \(0, 2\)",
        ),
        (
            lambda: metrics.cmc_score(torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 1)),
            r"gallery \(G, 2\) .* \(1, 3\)",
        ),
        (lambda: metrics.mrr(torch.ones(1, 0), torch.ones(1, 0), [1]), r"\(N, M\) of M items, got \(1, 0\)"),
        (lambda: metrics.mrr(torch.ones(1, 2), torch.tensor([[-1, 1]]), [1]), "1 relevances are negative or NaN"),
        (lambda: metrics.average_precision(torch.ones(1, 2), torch.tensor([[math.nan, 1]]), 1), "negative or NaN"),
    ],
)
def test_wrong_arguments_of_metrics_are_named(make, words):
    """Metrics of different classes or arguments are not merged, and wrong shapes are given in the message."""
    with pytest.raises(ValueError, match=words):
        make()
