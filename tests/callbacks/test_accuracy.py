"""Accuracy is the fraction of correct samples, over batches and processes of any size."""

import copy
from functools import partial
from itertools import chain

import pytest
import torch
from sklearn.metrics import accuracy_score, top_k_accuracy_score

from runnerkit.callbacks.metrics.accuracy import AccuracyCallback
from runnerkit.metrics.means import LoaderMeans, means_of
from tests.callbacks.stand_ins import end_loader, make_runner, run_loader
from tests.ranks import Ranks

NUM_CLASSES = 6


def make_batches(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "logits": torch.randn(size, NUM_CLASSES, generator=generator),
            "targets": torch.randint(0, NUM_CLASSES, (size,), generator=generator),
        }
        for size in sizes
    ]


def expected_accuracy(batches, k):
    logits = torch.cat([batch["logits"] for batch in batches])
    targets = torch.cat([batch["targets"] for batch in batches])
    return top_k_accuracy_score(targets, logits, k=k, labels=range(NUM_CLASSES))


def test_names_and_values_are_those_of_scikit_learn():
    """`accuracy` is top-1, and every name with a k has two digits."""
    batch = make_batches([32])
    runner = make_runner()

    run_loader(AccuracyCallback("logits", "targets", topk=(3, 1, 5)), runner, batch)

    expected = {f"accuracy{k:02d}": expected_accuracy(batch, k) for k in (1, 3, 5)}
    expected["accuracy"] = accuracy_score(batch[0]["targets"], batch[0]["logits"].argmax(1))
    assert {name: float(value) for name, value in runner.batch_metrics.items()} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ("accuracy01", "accuracy")),
        ({"topk": 3}, ("accuracy03",)),
        ({"topk": [5, 1, 5], "prefix": "a_", "suffix": "_z"}, ("a_accuracy05_z", "a_accuracy01_z", "a_accuracy_z")),
        ({"num_classes": 3}, ("accuracy01", "accuracy")),
        ({"num_classes": 5}, ("accuracy01", "accuracy03", "accuracy")),
        ({"num_classes": 10}, ("accuracy01", "accuracy03", "accuracy05", "accuracy")),
    ],
)
def test_names_are_known_before_training(arguments, names):
    """By default, k is below the number of classes, since top-k of k classes is always 1."""
    assert AccuracyCallback("logits", "targets", **arguments).provides == names


@pytest.mark.parametrize("shares", [[[8, 8, 3], [8, 5]], [[4], []], [[1], [16]]], ids=str)
def test_loader_value_is_that_of_all_samples_though_batches_log_nothing(shares):
    """The value is not a mean of means: short batches and ranks without batches count by their samples."""
    per_rank = [make_batches(sizes, seed=rank) for rank, sizes in enumerate(shares)]
    ranks = Ranks(len(shares))
    runners = [make_runner(engine=engine) for engine in ranks.engines]
    callbacks = [AccuracyCallback("logits", "targets", topk=(1, 3), log_on_batch=False) for _ in shares]

    for callback, runner, batches in zip(callbacks, runners, per_rank, strict=True):
        run_loader(callback, runner, batches)
    ranks.call(*(partial(end_loader, c, r) for c, r in zip(callbacks, runners, strict=True)))

    top1, top3 = (expected_accuracy(list(chain.from_iterable(per_rank)), k) for k in (1, 3))
    for runner in runners:
        assert runner.batch_metrics == {}
        expected = {"accuracy01": top1, "accuracy03": top3, "accuracy": top1}
        assert runner.loader_metrics == pytest.approx(expected, abs=1e-7)


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

    assert runner.loader_metrics == {"accuracy01": 0.9, "accuracy": 0.9}


def test_the_mean_that_the_runner_makes_is_the_same():
    """A loader has the same accuracy with and without logging on batches."""
    batches = make_batches([8, 8, 3])
    callback = AccuracyCallback("logits", "targets")
    means, runner = LoaderMeans(), make_runner()

    callback.on_loader_start(runner)
    for batch in batches:
        runner.batch = batch
        callback.on_batch_end(runner)
        means.update(runner.batch_metrics, len(batch["targets"]))

    values = means_of(means.share())
    assert values["accuracy01"] == pytest.approx(expected_accuracy(batches, 1), abs=1e-7)


@pytest.mark.parametrize("num_resumed", [2, 1])
def test_sums_within_a_loader_resume_on_any_number_of_processes(num_resumed):
    """A validation in the middle of the training loader does not change the sums."""
    per_rank, rest = [make_batches([4, 4], seed=1), make_batches([7], seed=2)], make_batches([9], seed=4)
    ranks, resumed_ranks = Ranks(2), Ranks(num_resumed)
    saved = [AccuracyCallback("logits", "targets", log_on_batch=False) for _ in per_rank]
    for callback, engine, batches in zip(saved, ranks.engines, per_rank, strict=True):
        run_loader(callback, make_runner(engine=engine), batches)

    states = copy.deepcopy(ranks.call(*(callback.state_dict for callback in saved)))
    callbacks = [AccuracyCallback("logits", "targets", log_on_batch=False) for _ in range(num_resumed)]
    runners = [make_runner(engine=engine, loader_batch_step=2) for engine in resumed_ranks.engines]
    for rank, (callback, runner) in enumerate(zip(callbacks, runners, strict=True)):
        callback.on_stage_start(runner)
        callback.load_state_dict(states[rank])
        run_loader(callback, runner, rest if rank == 0 else [])
        run_loader(callback, make_runner(engine=runner.engine, loader_key="valid"), make_batches([3]))
    resumed_ranks.call(*(partial(end_loader, c, r) for c, r in zip(callbacks, runners, strict=True)))

    expected = expected_accuracy([*chain.from_iterable(per_rank), *rest], 1)
    assert expected != expected_accuracy(rest, 1)
    assert [runner.loader_metrics["accuracy"] for runner in runners] == pytest.approx(
        [expected] * num_resumed, abs=1e-7
    )


def test_no_sums_are_kept_after_the_loader():
    """Between epochs, the callback's state is empty, and it does not hold the engine."""
    callback, runner = AccuracyCallback("logits", "targets", log_on_batch=False), make_runner()

    run_loader(callback, runner, make_batches([4]))
    end_loader(callback, runner)

    assert callback.state_dict() == {}
    assert not any(value is runner.engine for value in vars(callback).values())


@pytest.mark.parametrize("log_on_batch", [True, False])
def test_step_reads_nothing_from_the_device(log_on_batch):
    """The meta device computes shapes only, so reading a value from it raises."""
    batch = {
        "logits": torch.empty(8, NUM_CLASSES, device="meta"),
        "targets": torch.empty(8, dtype=torch.int64, device="meta"),
    }
    callback = AccuracyCallback("logits", "targets", topk=(1, 5), log_on_batch=log_on_batch)

    run_loader(callback, make_runner(), [batch, batch])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk": ()}, r"topk must be integers >= 1, such as \(1, 3\), got \(\)"),
        ({"topk": (0, 1)}, r"topk must be integers >= 1.*got \(0, 1\)"),
        ({"topk": (1, 5), "num_classes": 3}, r"topk \(1, 5\) exceeds the 3 classes"),
    ],
)
def test_bad_topk_is_refused(arguments, message):
    """The error is raised before training."""
    with pytest.raises(ValueError, match=message):
        AccuracyCallback("logits", "targets", **arguments)


def test_more_than_the_classes_is_refused_in_the_first_batch():
    """The number of classes is known only in the first batch."""
    with pytest.raises(ValueError, match=r"k must be in \[1, 6\] for 6 classes, got 7"):
        run_loader(AccuracyCallback("logits", "targets", topk=7), make_runner(), make_batches([4]))
