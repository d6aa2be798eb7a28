"""ConsoleLogger: one readable line for each pass over a loader."""

import io
import sys

import pytest
from tqdm import tqdm

from runnerkit.logger import Scope, Step
from runnerkit.loggers import ConsoleLogger


def write(logger: ConsoleLogger, scope: Scope = "loader", **metrics: float) -> None:
    logger.log_scalars(metrics or {"loss": 1.0}, step=Step("train", "train", 1, 9), scope=scope)


def test_lines_of_two_loaders_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    """The columns of the metrics are aligned, regardless of the loader's name and the length of the numbers."""
    logger = ConsoleLogger()

    write(logger, loss=0.31214, accuracy=0.9, lr=0.001)
    metrics = {"loss": 0.5, "accuracy": 0.8912, "lr": 0.001}
    logger.log_scalars(metrics, step=Step("train", "valid", 3, 9), scope="loader")

    assert capsys.readouterr().out.splitlines() == [
        "epoch  1  train | loss 0.3121 | accuracy 0.9    | lr 0.001",
        "epoch  3  valid | loss 0.5    | accuracy 0.8912 | lr 0.001",
    ]


def test_loader_without_metrics_has_a_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The user sees that an inference loader has run, although it does not compute metrics."""
    ConsoleLogger().log_scalars({}, step=Step("infer", "infer", 12, 9), scope="loader")

    assert capsys.readouterr().out == "epoch 12  infer\n"


def test_single_steps_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each step would hide the others."""
    write(ConsoleLogger(), "batch")

    assert capsys.readouterr().out == ""


def test_standard_output_is_looked_up_when_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger created before the output is redirected writes to the new output."""
    logger = ConsoleLogger()
    redirected = io.StringIO()
    monkeypatch.setattr(sys, "stdout", redirected)

    write(logger)

    assert redirected.getvalue() == "epoch  1  train | loss 1\n"


def test_lines_go_to_the_file_given(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The lines are written to `file` and are on disk after flush()."""
    path = tmp_path_factory.mktemp("console") / "log.txt"

    with path.open("w") as file:
        logger = ConsoleLogger(file=file)
        write(logger)
        logger.flush()

        assert path.read_text() == "epoch  1  train | loss 1\n"


def test_progress_bar_stays_below_the_lines() -> None:
    """The bar is cleared before a line is written, and drawn again after it."""
    terminal = io.StringIO()

    with tqdm(total=4, desc="bar", file=terminal) as bar:
        bar.update()
        write(ConsoleLogger(file=terminal))

        before, after = terminal.getvalue().split("epoch  1  train | loss 1\n")
        assert before.endswith("\r")
        assert "bar" in after
