"""Progress bars show the position in the run and cost nothing between refreshes."""

import io
import re

import pytest
import torch

from runnerkit import dl
from runnerkit.callbacks.monitor import progress
from runnerkit.callbacks.monitor.progress import TqdmCallback
from tests.callbacks.stand_ins import Clock, make_runner
from tests.callbacks.terminal import UNREADABLE, assert_reads_metrics_only_when_due
from tests.tiny import loader, mlp


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """Replace sys.stderr by a terminal, within the test: pytest replaces it after the fixtures."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


@pytest.fixture
def clock(monkeypatch):
    """Replace the time that bars read."""
    monkeypatch.setattr(progress, "time", clock := Clock())
    return clock


def test_bar_names_epoch_and_loader_and_ends_with_the_loader_metrics(monkeypatch):
    """The final text of a bar shows the loader's exact values, not those of the last batch."""
    terminal = open_terminal(monkeypatch)
    callback = TqdmCallback()
    runner = make_runner(loader_batch_len=2, stage_epoch_step=3, stage_epoch_len=10)

    callback.on_loader_start(runner)
    for loss in (0.5, 0.25):
        runner.batch_metrics = {"loss": torch.tensor(loss, requires_grad=True), "_timer/_fps": 7.0}
        callback.on_batch_end(runner)
    runner.loader_metrics = {"loss": 0.375, "accuracy": 1.0}
    callback.on_loader_end(runner)

    last_line = terminal.getvalue().rstrip().rsplit("\r", 1)[-1]
    assert last_line.startswith("3/10 * Epoch (train): 100%")
    assert "2/2" in last_line
    assert last_line.endswith("loss=0.375, accuracy=1]")
    assert "_timer" not in terminal.getvalue()


def test_metrics_are_read_only_when_a_refresh_is_due(monkeypatch, clock):
    """Reading a metric synchronizes with the device, so batches between refreshes do not read any."""
    open_terminal(monkeypatch)

    assert_reads_metrics_only_when_due(TqdmCallback(), clock, progress.REFRESH_S)


def test_nothing_is_written_or_read_without_a_terminal(monkeypatch):
    """Bars do not belong in a log file."""
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    callback, runner = TqdmCallback(), make_runner(loader_batch_len=2, batch_metrics=UNREADABLE)

    callback.on_loader_start(runner)
    callback.on_batch_end(runner)
    callback.on_loader_end(runner)

    assert file.getvalue() == ""


def test_validation_within_training_has_a_bar_of_its_own(monkeypatch):
    """The training bar continues from its count."""
    terminal = open_terminal(monkeypatch)
    callback = TqdmCallback()
    train, valid = make_runner(loader_batch_len=4), make_runner(loader_key="valid", loader_batch_len=2)

    callback.on_loader_start(train)
    callback.on_batch_end(train)
    callback.on_loader_start(valid)
    callback.on_batch_end(valid)
    callback.on_loader_end(valid)
    callback.on_batch_end(train)
    callback.on_loader_end(train)

    assert re.search(r"Epoch \(valid\): +0%.* 0/2.*Epoch \(train\): +50%.* 2/4", terminal.getvalue(), re.DOTALL)


def test_epochs_have_a_bar(monkeypatch):
    """The bar starts at the resumed epoch, counts finished epochs, and closes with the stage."""
    terminal = open_terminal(monkeypatch)
    callback = TqdmCallback()
    runner = make_runner(epoch_step=4, stage_epoch_step=4, stage_epoch_len=5, loader_batch_len=1)

    callback.on_epoch_start(runner)
    callback.on_loader_start(runner)
    callback.on_loader_end(runner)
    callback.on_epoch_end(runner)
    callback.on_stage_end(runner)

    assert re.search(r"Epochs: +60%.* 3/5 ", terminal.getvalue())
    last_line = terminal.getvalue().rstrip("\n").rsplit("\r", 1)[-1]
    assert re.match(r"Epochs: +80%.* 4/5 ", last_line)


def test_one_epoch_has_none(monkeypatch):
    """A bar of one epoch would show nothing."""
    terminal = open_terminal(monkeypatch)

    TqdmCallback().on_epoch_start(make_runner(stage_epoch_len=1))

    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("attributes", "shown"),
    [
        ({"loader_batch_len": 10, "loader_batch_step": 6}, r"6/10.*7/10"),
        ({"loader_batch_len": None}, r"Epoch \(train\): 1it"),
        ({"loader_batch_len": 3, "epoch_step": 0}, r"\A\Z"),
    ],
    ids=["resumed", "length unknown", "batch evaluated before training"],
)
def test_a_bar_counts_the_batches_of_epochs(monkeypatch, attributes, shown):
    """Batches before an interruption are counted once; a batch that finds the metrics is not an epoch."""
    terminal = open_terminal(monkeypatch)
    callback, runner = TqdmCallback(), make_runner(**attributes)

    callback.on_loader_start(runner)
    callback.on_batch_end(runner)
    callback.on_loader_end(runner)

    assert re.search(shown, terminal.getvalue(), re.DOTALL)


def test_exception_closes_every_bar(monkeypatch):
    """The traceback starts on a new line."""
    terminal = open_terminal(monkeypatch)
    callback = TqdmCallback()
    for key in ("train", "valid"):
        callback.on_loader_start(make_runner(loader_key=key, loader_batch_len=3))

    callback.on_exception(make_runner())

    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("callbacks", [None, []])
@pytest.mark.parametrize("verbose", [True, False])
def test_evaluate_loader_shows_its_bar(monkeypatch, callbacks, verbose):
    """The bar appears with own callbacks and with the runner's, but only if `verbose` is set."""
    terminal = open_terminal(monkeypatch)
    runner = dl.SupervisedRunner(model=mlp())

    runner.evaluate_loader(loader(8, 4), callbacks=callbacks, verbose=verbose, cpu=True)

    assert ("2/2" in terminal.getvalue()) == verbose
