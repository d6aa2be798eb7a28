"""Metric callbacks: values of single batches, cost of a loader's end, real processes, and resuming.

tests/test_exact_evaluation.py checks that a loader's values do not depend on its batches and ranks.
"""

import pytest
from torch.utils.data import DataLoader

from runnerkit import dl
from tests.callbacks.exact_metrics import CASES, as_numpy, expected_of, make_samples
from tests.callbacks.run_ranks import run_ranks
from tests.callbacks.stand_ins import make_runner, resume_on_ranks, run_loader
from tests.tiny import train

# float64 sums of at most 200 terms differ by far less, in any order; float32 arithmetic would differ at 1e-7.
TOLERANCE = {"rel": 1e-9, "abs": 1e-12, "nan_ok": True}


def split(samples, batch_size):
    size = len(samples["classes"])
    starts = range(0, size, batch_size)
    return [{key: each[start : start + batch_size] for key, each in samples.items()} for start in starts]


def test_a_batch_has_its_own_values():
    """Metrics logged for a batch are those of that batch alone."""
    samples = make_samples(9, seed=3)
    cases = ["accuracy", "f1", "iou", "mrr", "ndcg", "multilabel accuracy"]

    runners, _, _ = run_ranks([split(samples, 5)], cases)

    expected = expected_of({key: each[5:] for key, each in samples.items()})
    logged = {name: float(value) for name, value in runners[0].batch_metrics.items() if name in expected}
    assert len(logged) > 20
    assert logged == pytest.approx({name: expected[name] for name in logged}, **TOLERANCE)


@pytest.mark.parametrize(
    ("cases", "num_collectives"),
    [(["f1"], 1), ([name for name in CASES if "auc" not in name and name not in ("cmc", "r2")], 1), (list(CASES), 2)],
    ids=["one metric", "all that add up", "all"],
)
def test_a_loader_end_costs_one_collective(cases, num_collectives):
    """All callbacks whose states do not add up share one more collective."""
    samples = make_samples(40, seed=1)

    _, _, counted = run_ranks([split(samples, 5)[:5], split(samples, 5)[5:]], cases)

    assert counted == num_collectives


class PassOn(dl.Runner):
    """A runner without computation, so that callbacks read the batch unchanged."""

    def handle_batch(self, batch):
        self.batch = batch
        self.batch_metrics["loss"] = batch["logits"].square().mean()


def rows(samples):
    return [{key: each[index] for key, each in samples.items()} for index in range(len(samples["classes"]))]


# These processes are spawned: forked ones would share the hash seed, and with it the order of every set.
@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.cold)])
def test_metrics_of_real_processes(num_processes):
    """ "valid" has an uneven last batch, and in "valid_short" the second of two processes gets no batches."""
    data = {"train": make_samples(4, seed=2), "valid": make_samples(29, seed=5), "valid_short": make_samples(7, seed=6)}

    runner = train(
        runner=PassOn(),
        optimizer=None,
        num_processes=num_processes,
        loaders={key: DataLoader(rows(samples), batch_size=8) for key, samples in data.items()},
        callbacks={name: dl.ControlFlowCallback(make(), ignore_loaders="train") for name, (make, _) in CASES.items()},
    )

    for key in ("valid", "valid_short"):
        expected = expected_of(data[key]) | {"loss": data[key]["logits"].double().square().mean().item()}
        logged = {name: runner.epoch_metrics[key][name] for name in expected}
        assert logged.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-6), "batches are float32"
        assert logged == pytest.approx(expected, **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in CASES if "auc" not in name and name != "cmc"])
def test_step_reads_nothing_from_the_device(name):
    """The meta device computes shapes only, so reading a value from it raises."""
    samples = {key: each.to("meta") for key, each in make_samples(5, seed=0).items()}
    runner = make_runner()

    run_loader(CASES[name][0](), runner, [samples, samples])

    assert all(value.device.type == "meta" for value in runner.batch_metrics.values())


@pytest.mark.parametrize("name", ["f1", "r2", "auc of classes", "cmc", "iou", "ndcg", "accuracy, loader only"])
@pytest.mark.parametrize("num_resumed", [1, 2, 3])
def test_state_within_a_loader_resumes_on_any_number_of_processes(name, num_resumed):
    """After a checkpoint within a loader, the value still covers all of its samples."""
    samples = make_samples(31, seed=7)
    batches = split(samples, 6)
    make, reference = CASES[name]

    runners = resume_on_ranks(make(), [batches[:1], batches[1:3]], batches[3:], num_resumed=num_resumed)

    expected = reference(as_numpy(samples))
    for runner in runners:
        assert {key: runner.loader_metrics[key] for key in expected} == pytest.approx(expected, **TOLERANCE)
