"""The dashboard shows the current metrics of each loader, and reads and draws them only when due."""

import io
import sys
from functools import partial

import pytest
import torch

from runnerkit import dl
from runnerkit.callbacks.monitor import dashboard
from tests.callbacks.stand_ins import Clock, make_runner
from tests.callbacks.terminal import assert_reads_metrics_only_when_due
from tests.tiny import train

rich_console = pytest.importorskip("rich.console")


@pytest.fixture
def terminal(monkeypatch):
    """Replace rich's console with one that writes to memory as if to a terminal."""
    terminal = io.StringIO()
    console = partial(rich_console.Console, file=terminal, force_terminal=True, color_system=None, width=100)
    monkeypatch.setattr(rich_console, "Console", console)
    return terminal


def rows(terminal):
    """Return the cells of the last table drawn."""
    lines = terminal.getvalue().split("┏")[-1].splitlines()
    return [[cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]] for line in lines if line[:1] in "┃│"]


def test_metrics_are_read_and_drawn_only_when_it_is_time(terminal, monkeypatch):
    """Each reading synchronizes with the device and each drawing takes milliseconds, so most batches do neither."""
    monkeypatch.setattr(dashboard, "time", clock := Clock())

    assert_reads_metrics_only_when_due(dl.RichDashboardCallback(), clock, dashboard.REFRESH_S, terminal.getvalue)

    assert rows(terminal) == [["metric", "train"], ["loss", "0.5"]]


def test_validation_within_training_has_a_column_of_its_own(terminal):
    """A loader's progress stays on the screen while another one runs, and each ends with its own values."""
    callback = dl.RichDashboardCallback()
    train = make_runner(loader_batch_len=4, loader_batch_step=2)
    valid = make_runner(loader_key="valid", loader_batch_len=2, loader_batch_step=2, is_train_loader=False)
    callback.on_stage_start(train)
    callback.on_epoch_start(train)
    for runner in (train, valid):
        callback.on_loader_start(runner)
    valid.loader_metrics = {"loss": 0.25, "auc": torch.tensor(0.75), "_timer/_fps": 7.0}
    callback.on_loader_end(valid)
    train.loader_batch_step, train.loader_metrics = 4, {"loss": 0.125}
    callback.on_loader_end(train)
    callback.on_epoch_end(train)

    callback.on_stage_end(train)

    assert rows(terminal) == [["metric", "valid", "train"], ["loss", "0.25", "0.125"], ["auc", "0.75", ""]]
    bars = terminal.getvalue().split("┏")[-2].split("\x1b[2K")[-1].splitlines()
    shown = [(line.split()[0], line.split()[-1]) for line in bars]
    assert shown == [("epochs", "1/3"), ("train", "4/4"), ("valid", "2/2")]


def test_exception_gives_the_terminal_back(terminal):
    """After an exception, the cursor is visible again and stdout is restored."""

    class Fails(dl.Callback):
        def on_batch_end(self, runner):
            raise ArithmeticError("no")

    stdout = sys.stdout
    with pytest.raises(ArithmeticError):
        train(callbacks=[dl.RichDashboardCallback(), Fails()])

    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l") >= 0
    assert sys.stdout is stdout


@pytest.mark.parametrize("name", ["iou[cat]", "acc[/x]", "a:star:", "b\\"])
def test_names_are_shown_as_they_are(terminal, name):
    """A name of a metric or a loader may look like markup of rich, or like an emoji."""
    callback = dl.RichDashboardCallback()
    runner = make_runner(loader_key=name, loader_metrics={name: 0.5})
    callback.on_stage_start(runner)
    callback.on_epoch_start(runner)
    callback.on_loader_start(runner)
    callback.on_loader_end(runner)

    callback.on_stage_end(runner)

    assert rows(terminal) == [["metric", name], [name, "0.5"]]
    assert name in [line.split()[0] for line in terminal.getvalue().split("┏")[-2].splitlines() if line.strip()]


def test_a_drawing_that_fails_gives_the_terminal_back(terminal, monkeypatch):
    """The error can be printed."""

    def fail(self):
        raise ArithmeticError("no")

    monkeypatch.setattr(dl.RichDashboardCallback, "_draw", fail)
    streams = sys.stdout, sys.stderr
    with pytest.raises(ArithmeticError):
        train(callbacks=[dl.RichDashboardCallback()])

    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.parametrize("bars", [dl.RichDashboardCallback, dl.TqdmCallback])
def test_verbose_adds_no_second_one(bars):
    """A user's progress display and model table replace those of `verbose=True`."""
    runner = train(callbacks={"mine": bars(), "deep": dl.ModelSummaryCallback(depth=9)}, verbose=True)

    assert "_run_summary" in runner.callbacks
    assert not {"_tqdm", "_model_summary"} & runner.callbacks.keys()


def test_missing_rich_names_the_install_command(monkeypatch):
    """The error is raised when the callback is constructed, not in another process."""
    monkeypatch.setitem(sys.modules, "rich", None)  # import raises ImportError

    with pytest.raises(ImportError, match=r"RichDashboardCallback needs rich: pip install runnerkit\[rich\]"):
        dl.RichDashboardCallback()
