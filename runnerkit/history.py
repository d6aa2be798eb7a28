"""Logs of past runs as one tidy table."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runnerkit.logger import Scope

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("run", "stage", "loader", "epoch", "step", "metric", "value")
_NUM_PLACE_COLUMNS = 3  # a file's first columns: stage, epoch, step; the others are metrics

Row = tuple[str, str, str, int, int, str, float]


def read_metrics(
    logdir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, scope: Scope = "loader"
) -> pd.DataFrame:
    """Read what the CSV logger wrote, a row for each number, in the order it was logged.

    Args:
        logdir: of one run, a folder with the logdirs of several at any depth, or a list of such folders.
        scope: "loader" for whole passes over a loader, "batch" for single training steps.
    Returns:
        Columns run (the logdir's name, or its path within the folder), stage, loader, metric: str; epoch, step:
        int64; value: float64, exactly what was logged, NaN included.
    Raises:
        FileNotFoundError: there are no such logs.

    >>> import tempfile
    >>> from runnerkit.logger import Step
    >>> from runnerkit.loggers import CSVLogger
    >>> logger = CSVLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> logger.log_scalars({"loss": 0.5, "lr": 0.1}, step=Step("train", "train", epoch=1, batch=9), scope="loader")
    >>> logger.close()
    >>> print(read_metrics(logger.logdir).drop(columns="run").to_string(index=False))
    stage loader  epoch  step metric  value
    train  train      1     9   loss    0.5
    train  train      1     9     lr    0.1
    """
    if scope not in ("loader", "batch"):
        raise ValueError(f'scope must be "loader" or "batch", got {scope!r}')
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("read_metrics needs pandas: pip install runnerkit[metrics]") from error
    folders = [Path(each) for each in ([logdir] if isinstance(logdir, str | os.PathLike) else logdir)]
    runs = [run for folder in folders for run in _find_runs(folder, scope)]
    num_named = Counter(name for name, _ in runs)
    rows = [
        row
        for name, folder in runs
        for row in _read_run(name if num_named[name] == 1 else folder.as_posix(), folder, scope)
    ]
    types = {"epoch": "int64", "step": "int64", "value": "float64"}
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(types)


def _find_runs(folder: Path, scope: Scope) -> list[tuple[str, Path]]:
    logdirs = sorted(each.parent for each in folder.rglob("csv") if next(_files(each, scope), None) is not None)
    if not logdirs:
        raise FileNotFoundError(f"no logs of scope {scope!r} in {folder}: expected csv/<loader>.csv there or below")
    return [(_name(logdir, folder), logdir) for logdir in logdirs]


def _name(logdir: Path, folder: Path) -> str:
    return folder.resolve().name if logdir == folder else logdir.relative_to(folder).as_posix()


def _files(folder: Path, scope: Scope) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.csv")) if path.name.endswith(".batch.csv") == (scope == "batch"))


def _read_run(run: str, logdir: Path, scope: Scope) -> Iterator[Row]:
    folder = logdir / "csv"
    for path in _files(folder, scope):
        loader = path.relative_to(folder).as_posix().removesuffix(".csv").removesuffix(".batch")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            metrics = next(reader, [])[_NUM_PLACE_COLUMNS:]
            for stage, epoch, step, *cells in reader:
                for metric, cell in zip(metrics, cells, strict=True):
                    if cell:
                        yield run, stage, loader, int(epoch), int(step), metric, float(cell)
