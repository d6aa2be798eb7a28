"""Logger that prints metrics and texts to the console."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from runnerkit.logger import ILogger, Scope, Step

__all__ = ["ConsoleLogger"]


class ConsoleLogger(ILogger):
    """Logger that prints a line for each pass over a loader, above a progress bar if one is shown.

    Args:
        file: the output file; None is `sys.stdout` at the time of each call.

    >>> logger = ConsoleLogger()
    >>> logger.log_scalars({"loss": 0.31214, "lr": 0.001}, step=Step("train", "train", 3, 500), scope="loader")
    epoch  3  train | loss 0.3121 | lr 0.001
    """

    def __init__(self, *, file: TextIO | None = None) -> None:
        if file is not None and not hasattr(file, "write"):
            raise TypeError(f"ConsoleLogger: file must be an open text file or None, got {file!r}")
        self.file = file
        self._width = len("train")

    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        if scope != "loader":
            return
        self._width = max(self._width, len(step.loader))
        # Padded, so that the metrics of consecutive lines are aligned.
        cells = [f"{name} {value:<6.4g}" for name, value in scalars.items()]
        line = " | ".join([f"epoch {step.epoch:2d}  {step.loader:<{self._width}}", *cells])
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
