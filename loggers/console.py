"""Logger that prints metrics and texts to the console."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from runnerkit.logger import ILogger, Scope, Step
from runnerkit.support.arguments import check_numbers

__all__ = ["ConsoleLogger"]

_SPEED = ("samples/s", "tokens/s")


class ConsoleLogger(ILogger):
    """Logger that prints a line for each pass over a loader, above a progress bar if one is shown.

    With `log_batch_metrics` it also prints the logged training steps: the loss, the learning rates, samples and tokens
    per second, then the other metrics; and all lines show the number of training batches so far, as the CSV files do.

    Args:
        file: the output file; None is `sys.stdout` at the time of each call.
        log_batch_metrics: print training steps too.
        every_s: print one of them at most every so many seconds; 0 prints all that are logged.

    >>> logger = ConsoleLogger()
    >>> logger.log_scalars({"loss": 0.31214, "lr": 0.001}, step=Step("train", "train", 3, 500), scope="loader")
    epoch  3  train | loss 0.3121 | lr 0.001
    >>> logger = ConsoleLogger(log_batch_metrics=True)
    >>> metrics = {"accuracy": 0.75, "loss": 0.31214, "lr": 0.001, "samples/s": 512.3}
    >>> logger.log_scalars(metrics, step=Step("train", "train", 3, 500), scope="batch")
    epoch  3  step 500  train | loss 0.3121 | lr 0.001  | samples/s 512.3  | accuracy 0.75
    """

    def __init__(self, *, file: TextIO | None = None, log_batch_metrics: bool = False, every_s: float = 0.0) -> None:
        if file is not None and not hasattr(file, "write"):
            raise TypeError(f"ConsoleLogger: file must be an open text file or None, got {file!r}")
        self.file = file
        check_numbers(self, least=0, every_s=every_s)
        self.log_batch_metrics = self.log_throughput = log_batch_metrics
        self.every_s = every_s
        self._width = len("train")
        self._step_width = 0
        self._shown_at_s = -math.inf  # the last training step

    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        if scope == "batch":
            now = time.monotonic()
            if not self.log_batch_metrics or now - self._shown_at_s < self.every_s:
                return
            self._shown_at_s = now
            scalars = dict(sorted(scalars.items(), key=lambda item: _rank(item[0])))
        self._width = max(self._width, len(step.loader))
        place = f"epoch {step.epoch:2d}"
        if self.log_batch_metrics:
            self._step_width = max(self._step_width, len(str(step.batch)))
            place += f"  step {step.batch:{self._step_width}d}"
        # Padded, so that the metrics of consecutive lines are aligned.
        cells = [
            f"{name} {value:<6.0f}" if value > 1e4 and name in _SPEED else f"{name} {value:<6.4g}"
            for name, value in scalars.items()
        ]
        line = " | ".join([f"{place}  {step.loader:<{self._width}}", *cells])
        tqdm.write(line.rstrip(), file=self._stream)

    def log_text(self, tag: str, text: str, *, step: Step, scope: Scope) -> None:
        separator = "\n" if "\n" in text else " "  # keeps the columns of a table aligned
        tqdm.write(f"{tag}:{separator}{text}", file=self._stream)

    def log_notice(self, text: str) -> None:
        tqdm.write(text, file=self._stream)

    def flush(self) -> None:
        self._stream.flush()

    @property
    def _stream(self) -> TextIO:
        return self.file if self.file is not None else sys.stdout  # looked up late: notebooks and tests replace it


def _rank(name: str) -> int:
    """Return the place of a metric in the line of a training step: losses, learning rates, throughput, others."""
    if name == "loss":
        return 0
    if name.startswith("loss"):
        return 1
    if name == "lr" or name.startswith(("lr_", "lr/")):
        return 2
    return 3 if name in _SPEED else 4
