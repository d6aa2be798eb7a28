"""A run whose length, validation or logs count steps has curves of steps by default: files as users read them."""

import csv
import re
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from runnerkit import dl, read_metrics
from runnerkit.loop.loader_pass import Pass
from runnerkit.loop.throughput import Throughput, with_throughput
from tests.interrupt import Interrupt, at
from tests.tiny import loader, mlp, sgd

NUM_BATCHES = 40


def run(logdir=None, *, runner=None, model=None, loaders=None, loggers=None, **options):
    """Train as a user does: with the default loggers."""
    torch.manual_seed(0)
    model = model or mlp()
    loaders = loaders or {"train": loader(4 * NUM_BATCHES, 4), "valid": loader(8, 4)}
    parts = {"model": model, "criterion": nn.CrossEntropyLoss(), "optimizer": sgd(model), "loaders": loaders}
    return (runner or dl.SupervisedRunner()).train(**parts, logdir=logdir, loggers=loggers, cpu=True, **options)


def curve(logdir, key, tag):
    """Return the points (x, value) of a curve in TensorBoard; none if it does not exist."""
    events = EventAccumulator(str(logdir / "tensorboard" / key), size_guidance={"scalars": 0}).Reload()
    return [(each.step, each.value) for each in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def losses_of(losses):
    """Return a callback that keeps the loss of each training step."""

    def keep(runner):
        if runner.is_train_loader:
            losses[runner.batch_step] = runner.batch_metrics["loss"].item()

    return at("on_batch_end", keep)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"num_steps": 25}, [10, 20]),
        ({"log_every": 8}, [8, 16, 24, 32, 40]),
        ({"num_epochs": 2, "log_every": 10}, [10, 20, 30, 40, 50, 60, 70, 80]),
        ({"valid_every_steps": 15}, [10, 20, 30, 40]),
        ({"num_steps": 25, "log_every": 5}, [5, 10, 15, 20, 25]),
    ],
)
def test_an_argument_that_counts_steps_gives_curves_of_steps(options, steps, tmp_path):
    """Loss and learning rate of the steps, the same numbers in TensorBoard, CSV and `read_metrics`."""
    losses = {}

    run(tmp_path, callbacks=[losses_of(losses)], **options)

    expected = [(step, losses[step]) for step in steps]
    assert curve(tmp_path, "train", "batch/loss") == expected
    table = rows(tmp_path / "csv" / "train.batch.csv")
    assert [(int(row["step"]), float(row["loss"])) for row in table] == expected
    assert [float(row["lr"]) for row in table] == [0.1] * len(steps)
    assert set(table[0]) == {"stage", "epoch", "step", "loss", "lr"}  # no times, which a resume would change
    frame = read_metrics(tmp_path, scope="batch")
    assert frame[frame.metric == "loss"].value.tolist() == [loss for _, loss in expected]


def test_nothing_changes_without_such_an_argument(tmp_path, capsys):
    """Curves of epochs, one line for each pass over a loader, and no queue of steps."""
    seen = []
    callback = at("on_batch_end", lambda runner: seen.append(runner.current_run.logs.wants_batch_metrics))

    run(tmp_path, callbacks=[callback], num_epochs=2)

    assert not any(seen) and not list(tmp_path.rglob("*.batch.csv"))
    assert [x for x, _ in curve(tmp_path, "valid", "loss")] == [1, 2]
    assert curve(tmp_path, "train", "batch/loss") == []
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("started: ")
    assert [line.split("|")[0].split() for line in lines] == [
        ["epoch", epoch, key] for epoch in "12" for key in ("train", "valid")
    ]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"valid_every_steps": 15}, [15, 30, 40]),
        ({"num_steps": 25, "valid_every_steps": 10}, [10, 20, 25]),
        ({"num_steps": 25}, [25]),
        ({"num_steps": 60}, [40, 60]),
    ],
)
def test_validations_within_an_epoch_are_points_at_their_steps(options, steps, tmp_path, capsys):
    """By epoch, TensorBoard would show the last of them only, and lines of the console would look alike."""
    run(tmp_path, **options)

    points = curve(tmp_path, "valid", "loss")
    assert [x for x, _ in points] == steps
    table = rows(tmp_path / "csv" / "valid.csv")
    assert [(int(row["step"]), pytest.approx(float(row["loss"]))) for row in table] == points
    lines = [line for line in capsys.readouterr().out.splitlines() if "  valid | " in line]
    assert [int(re.match(r"epoch +\d+  step +(\d+)  valid \| loss ", line)[1]) for line in lines] == steps


def test_a_line_has_loss_step_rate_and_throughput(capsys):
    """In this order, before other metrics."""

    class Scores(dl.SupervisedRunner):
        def handle_batch(self, batch):
            self.batch_metrics["a_first"] = 0.5
            super().handle_batch(batch)

    run(runner=Scores(), log_every=20)

    lines = [line for line in capsys.readouterr().out.splitlines() if "samples/s" in line]
    form = r"epoch  1  step (\d+)  train \| loss (\S+) *\| lr 0\.1 *\| samples/s (\S+) *\| a_first 0\.5"
    found = [re.fullmatch(form, line) for line in lines]
    assert [int(each[1]) for each in found] == [20, 40]
    assert all(float(each[2]) > 0 and float(each[3]) > 0 for each in found)


@pytest.mark.parametrize("has_more", [False, True])
def test_tokens_per_second_count_the_weights_of_batches(has_more, capsys, monkeypatch):
    """They are those of all batches since the last line, whatever their metrics.

    A clock that ticks once a reading makes them exact.
    """
    now = iter(range(1_000_000))
    monkeypatch.setattr("runnerkit.loop.throughput.time.perf_counter", lambda: float(next(now)))

    class Weighted(dl.SupervisedRunner):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            self.batch_weight = torch.tensor(100.0 + self.loader_batch_step)
            if has_more and self.loader_batch_step in (1, 6):
                self.batch_metrics["more"] = torch.ones(())

    run(runner=Weighted(), loaders={"train": loader(32, 4)}, log_every=4)

    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert [float(re.search(r"samples/s (\S+)", line)[1]) for line in lines] == [16, 16]
    assert [float(re.search(r"tokens/s (\S+)", line)[1]) for line in lines] == [410, 426]


def test_processes_that_work_on_the_same_samples_count_their_tokens_once(monkeypatch):
    """Of four processes in two groups of tensor parallelism, two read different batches."""
    now = iter(range(1_000_000))
    monkeypatch.setattr("runnerkit.loop.throughput.time.perf_counter", lambda: float(next(now)))
    current, throughput = Pass("train", num_processes=2), Throughput()
    runner = SimpleNamespace(
        loader_pass=current, sample_step=0, batch_weight=10.0, engine=SimpleNamespace(num_processes=4)
    )
    throughput.start(runner)

    current.means.update({"loss": torch.ones(())}, 3, weight=10.0)
    runner.sample_step = 6

    assert with_throughput(throughput.take(runner)) == {"samples/s": 6.0, "tokens/s": 20.0}


def test_a_validation_is_not_part_of_the_throughput(capsys, monkeypatch):
    """The clock of training stands still in it."""
    clock = {"now": 0.0}
    monkeypatch.setattr("runnerkit.loop.throughput.time.perf_counter", lambda: clock["now"])

    def work(runner):
        clock["now"] += 1.0 if runner.is_train_loader else 1000.0

    run(callbacks=[at("on_batch_start", work)], log_every=10, valid_every_steps=4)

    lines = [line for line in capsys.readouterr().out.splitlines() if "samples/s" in line]
    assert [float(re.search(r"samples/s (\S+)", line)[1]) for line in lines] == [4.0] * 4


def test_lines_are_few_unless_their_interval_is_given(capsys):
    """A run of many steps prints a line every ten seconds; `log_every` prints each logged step."""
    run(num_steps=NUM_BATCHES)
    few = [line for line in capsys.readouterr().out.splitlines() if "samples/s" in line]
    run(num_steps=NUM_BATCHES, log_every=10)
    all_lines = [line for line in capsys.readouterr().out.splitlines() if "samples/s" in line]

    assert 1 <= len(few) < len(all_lines) == 4 or len(few) == 4  # on a very slow machine


def test_ones_own_loggers_stay_as_they_are(tmp_path, capsys):
    """`loggers` replaces the defaults, with its own settings."""
    run(tmp_path, num_steps=20, loggers={"csv": dl.CSVLogger(tmp_path), "console": dl.ConsoleLogger()})

    assert not list(tmp_path.rglob("*.batch.csv"))
    assert [x for x, _ in curve(tmp_path, "train", "batch/loss")] == [10, 20]
    assert "step" not in capsys.readouterr().out


def test_a_resumed_run_of_steps_has_the_same_files(tmp_path):
    """Steps and validations that the interrupted run logged after its checkpoint are not there twice."""
    options = {"num_steps": 35, "log_every": 5, "valid_every_steps": 10}
    run(tmp_path / "whole", **options)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", callbacks=[Interrupt(27)], **options)
    run(tmp_path / "killed", resume="auto", **options)

    for name in ("train.csv", "valid.csv", "train.batch.csv"):
        assert (tmp_path / "killed" / "csv" / name).read_text() == (tmp_path / "whole" / "csv" / name).read_text()
    for key, tag in (("train", "batch/loss"), ("valid", "loss")):
        assert curve(tmp_path / "killed", key, tag) == curve(tmp_path / "whole", key, tag)


def test_accumulated_batches_are_logged_at_their_batch(tmp_path):
    """`log_every` counts optimizer steps; x is the number of batches, as for all other entries."""
    run(tmp_path, accumulation_steps=2, log_every=5)

    assert [x for x, _ in curve(tmp_path, "train", "batch/loss")] == [10, 20, 30, 40]


def test_a_logger_takes_the_throughput_if_it_asks_for_it():
    """The user's own metric of that name is left alone."""

    class Log(dl.ILogger):
        log_batch_metrics = True

        def __init__(self, log_throughput):
            self.log_throughput, self.names = log_throughput, set()

        def log_scalars(self, scalars, *, step, scope):
            self.names |= scalars.keys() if scope == "batch" else set()

    asks, does_not = Log(True), Log(False)
    run(loggers={"console": None, "a": asks, "b": does_not}, num_steps=10)

    assert asks.names == {"loss", "lr", "samples/s"} and does_not.names == {"loss", "lr"}
