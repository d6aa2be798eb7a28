"""Accuracy is the fraction of correct rows.

tests/test_exact_evaluation.py evaluates it on any batches and processes.
"""

import pytest
import torch

from runnerkit.callbacks.metrics.accuracy import AccuracyCallback
from runnerkit.metrics.means import LoaderMeans, means_of
from tests.callbacks.stand_ins import end_loader, make_runner, run_loader

LOGITS = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, 6, (32,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ("accuracy",)),
        ({"topk": 3}, ("accuracy03",)),
        ({"topk": [5, 1, 5], "prefix": "a_", "suffix": "_z"}, ("a_accuracy05_z", "a_accuracy_z")),
        ({"num_classes": 3}, ("accuracy",)),
        ({"num_classes": 5}, ("accuracy", "accuracy03")),
        ({"num_classes": 10}, ("accuracy", "accuracy03", "accuracy05")),
    ],
)
def test_names_are_known_before_training(arguments, names):
    """By default, k is below the number of classes, since top-k of k classes is always 1."""
    assert AccuracyCallback("logits", "targets", **arguments).provides == names


@pytest.mark.parametrize("log_on_batch", [True, False])
def test_rows_are_counted_also_where_they_are_no_samples(log_on_batch):
    """A batch of 9 tokens and one of 1 give 9 of 10 right, not half of the batches."""
    logits = torch.eye(2)[torch.tensor([0] * 10)]
    batches = [
        {"logits": logits[:9], "targets": torch.zeros(9, dtype=torch.int64)},
        {"logits": logits[9:], "targets": torch.ones(1, dtype=torch.int64)},
    ]
    callback, runner = AccuracyCallback("logits", "targets", log_on_batch=log_on_batch), make_runner()

    callback.on_loader_start(runner)
    means = LoaderMeans()
    for runner.batch in batches:
        callback.on_batch_end(runner)
        means.update(runner.batch_metrics, batch_size=1)  # a batch is one sample
    runner.loader_metrics = means_of(means.share())
    end_loader(callback, runner)

    assert runner.loader_metrics == {"accuracy": 0.9}
    assert callback.state_dict() == {}
    assert not any(value is runner.engine for value in vars(callback).values())


def test_more_than_the_classes_is_refused_in_the_first_batch():
    """The number of classes is known only in the first batch."""
    with pytest.raises(ValueError, match=r"k must be in \[1, 6\] for 6 classes, got 7"):
        run_loader(AccuracyCallback("x", "y", topk=7), make_runner(), [{"x": LOGITS, "y": TARGETS}])
