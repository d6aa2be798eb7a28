"""Progress bars show the position in the run and cost nothing between refreshes."""

import io
import re

import pytest
import torch

from runnerkit import dl
from runnerkit.callback import CallbackNode
from runnerkit.callbacks.monitor import progress
from runnerkit.callbacks.monitor.progress import TqdmCallback
from tests.callbacks.stand_ins import make_runner
from tests.callbacks.terminal import UNREADABLE, Clock, assert_reads_metrics_only_when_due
from tests.tiny import loader, mlp, sgd


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """Replace sys.stderr by a terminal; call it within the test, since pytest replaces sys.stderr after the
    fixtures."""
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
    assert last_line.endswith("accuracy=1, loss=0.375]")
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


def test_validation_within_training_has_a_bar_of_its_own_below(monkeypatch):
    """The training bar continues from its count."""
    terminal = open_terminal(monkeypatch)
    callback = TqdmCallback()
    train = make_runner(loader_batch_len=4)
    valid = make_runner(loader_key="valid", loader_batch_len=2)

    callback.on_loader_start(train)
    callback.on_batch_end(train)
    callback.on_loader_start(valid)
    positions = {key: abs(bar.pos) for key, bar in callback._bars.items()}
    callback.on_batch_end(valid)
    callback.on_loader_end(valid)
    callback.on_batch_end(train)
    count = callback._bars["train"].n
    callback.on_loader_end(train)

    assert positions == {"train": 0, "valid": 1}
    assert count == 2
    assert re.search(r"Epoch \(train\): +50%.* 2/4", terminal.getvalue())
    assert not callback._bars


def test_epochs_have_a_bar_above(monkeypatch):
    """The bar starts at the resumed epoch, counts finished epochs, and closes with the stage."""
    terminal = open_terminal(monkeypatch)
    callback = TqdmCallback()
    runner = make_runner(epoch_step=4, stage_epoch_step=4, stage_epoch_len=5, loader_batch_len=1)

    callback.on_epoch_start(runner)
    callback.on_loader_start(runner)
    positions = abs(callback._epochs.pos), abs(callback._bars["train"].pos)
    callback.on_loader_end(runner)
    callback.on_epoch_end(runner)
    callback.on_stage_end(runner)

    assert positions == (0, 1)
    assert callback._epochs is None
    assert re.search(r"Epochs: +60%.* 3/5 ", terminal.getvalue())
    last_line = terminal.getvalue().rstrip("\n").rsplit("\r", 1)[-1]
    assert re.match(r"Epochs: +80%.* 4/5 ", last_line)


def test_one_epoch_has_none(monkeypatch):
    """A bar of one epoch would show nothing."""
    open_terminal(monkeypatch)
    callback = TqdmCallback()

    callback.on_epoch_start(make_runner(stage_epoch_len=1))

    assert callback._epochs is None


def test_learning_rate_and_smoothed_loss_are_shown(monkeypatch, clock):
    """The loss is the mean of the batches so far, each weighted 0.98 times the next one."""
    terminal = open_terminal(monkeypatch)
    callback = TqdmCallback()
    runner = make_runner(loader_batch_len=3, optimizer=sgd(mlp(), lr=0.125))

    callback.on_loader_start(runner)
    for loss in (4.0, 1.0, 1.0):
        runner.loader_batch_step += 1
        runner.batch_metrics = {"loss": torch.tensor(loss)}
        callback.on_batch_end(runner)
        runner._loader_run.means.update(runner.batch_metrics, batch_size=2)
        clock.now += progress.REFRESH_S
    callback.on_exception(runner)

    smoothed = (0.98 * 4 + 1) / (0.98 + 1)
    assert terminal.getvalue().rstrip().endswith(f"loss={smoothed:.4g}, lr=0.125]")


def test_resumed_loader_starts_where_it_was(monkeypatch):
    """Batches before the interruption are counted once."""
    terminal = open_terminal(monkeypatch)
    callback, runner = TqdmCallback(), make_runner(loader_batch_len=10, loader_batch_step=6)

    callback.on_loader_start(runner)
    callback.on_loader_end(runner)

    assert "6/10" in terminal.getvalue()


def test_loader_without_length_is_counted(monkeypatch):
    """An IterableDataset may not know its length."""
    terminal = open_terminal(monkeypatch)
    callback, runner = TqdmCallback(), make_runner(loader_batch_len=None)

    callback.on_loader_start(runner)
    callback.on_batch_end(runner)
    callback.on_loader_end(runner)

    assert re.search(r"Epoch \(train\): 1it", terminal.getvalue())


def test_exception_closes_every_bar(monkeypatch):
    """The traceback starts on a new line."""
    terminal = open_terminal(monkeypatch)
    callback = TqdmCallback()
    bars = []
    for key in ("train", "valid"):
        callback.on_loader_start(make_runner(loader_key=key, loader_batch_len=3))
        bars.append(callback._bars[key])

    callback.on_exception(make_runner())

    assert all(bar.disable for bar in bars)  # close() sets this
    assert not callback._bars
    assert terminal.getvalue().endswith("\n")


def test_check_before_training_has_no_bar(monkeypatch):
    """The batch that is evaluated before training, to find the metrics, is not an epoch."""
    terminal = open_terminal(monkeypatch)
    callback, runner = TqdmCallback(), make_runner(epoch_step=0, loader_batch_len=3)

    callback.on_loader_start(runner)
    callback.on_batch_end(runner)
    callback.on_loader_end(runner)

    assert terminal.getvalue() == ""


def test_one_process_shows_bars():
    """Output of several ranks would be unreadable."""
    assert TqdmCallback().node == CallbackNode.Master


@pytest.mark.parametrize("callbacks", [None, []])
@pytest.mark.parametrize("verbose", [True, False])
def test_evaluate_loader_shows_its_bar(monkeypatch, callbacks, verbose):
    """The bar appears with own callbacks and with the runner's, but only if `verbose` is set."""
    terminal = open_terminal(monkeypatch)
    runner = dl.SupervisedRunner(model=mlp())

    runner.evaluate_loader(loader(8, 4), callbacks=callbacks, verbose=verbose, cpu=True)

    assert ("2/2" in terminal.getvalue()) == verbose
