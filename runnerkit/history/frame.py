"""Logs of past runs as one tidy table."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.errors import UnknownKeyError, did_you_mean
from runnerkit.history import json_lines
from runnerkit.history.hyperparameters import Settings, differing_settings
from runnerkit.logger import Scope
from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.remote.urls import shown, url_of
from runnerkit.storage.status_file import describe, folders_with_status, read_status

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("run", "stage", "loader", "epoch", "step", "metric", "value")
_PLACE = ["stage", "epoch", "step"]  # the first columns of each file; the others are metrics

Logdirs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Row = tuple[str, str, str, int, int, str, float]


def read_metrics(logdir: Logdirs, *, scope: Scope = "loader") -> pd.DataFrame:
    """Read the logs of the CSV logger, or else of the JSONL logger: one row per number, in the order of logging.

    Args:
        logdir: the logdir of a run, a folder that contains several at any depth, or a list of such folders; each may
            be a URL, such as "s3://bucket/run".
        scope: "loader" for whole passes over a loader, "batch" for single training steps.
    Returns:
        Columns run (the logdir's name, or its path within the folder), stage, loader, metric: str; epoch, step:
        int64; value: float64, exactly as logged, NaN included. Of several runs, also a column for each hyperparameter
        and recorded setting in which they differ, such as "lr" or "batch_size.train"; one named like a column above
        gets the prefix "hparams.".
    Raises:
        FileNotFoundError: there are no logs of this scope.

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
    runs = find_runs(logdir, scope=scope)
    rows = [row for run, folder in runs.items() for row in _read_run(run, folder, scope)]
    if not rows:
        raise FileNotFoundError(f"the logs of scope {scope!r} in {', '.join(map(shown, runs.values()))} lack rows")
    types = {"epoch": "int64", "step": "int64", "value": "float64"}
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(types)
    return add_settings(table, differing_settings(runs))


def add_settings(table: pd.DataFrame, settings: Mapping[str, Settings]) -> pd.DataFrame:
    """Add a column for each setting to a table with a column "run"; lists become strings, integers stay integers.

    Args:
        settings: by run, the same names for each.
    """
    import pandas as pd

    for name in next(iter(settings.values()), {}):
        cells = {run: each[name] for run, each in settings.items()}
        plain: dict[str, Any] = {run: str(cell) if isinstance(cell, list) else cell for run, cell in cells.items()}
        given = [cell for cell in plain.values() if cell is not None]
        table[name] = table["run"].map(plain)
        if table[name].dtype == "float64" and all(type(cell) is int for cell in given):  # because some runs lack it
            kind: Any = "Int64" if max(map(abs, given)) < 2**63 else object
            table[name] = pd.Series([plain[run] for run in table["run"]], index=table.index, dtype=kind)
    return table


def select(
    table: pd.DataFrame, *, metrics: Sequence[str] | None = None, loaders: Sequence[str] | None = None
) -> pd.DataFrame:
    """Select the rows of these metrics and loaders; None selects all.

    Raises:
        KeyError: the table does not contain one of them.
    """
    for column, wanted in {"loader": loaders, "metric": metrics}.items():
        if wanted is not None:
            known = list(table[column].unique())
            unknown = [each for each in wanted if each not in known]
            if unknown or not wanted:
                of_loaders = f" by {loaders}" if column == "metric" and loaders is not None else ""
                found = f"{column}s {unknown} were not logged{of_loaders}" if unknown else f"got no {column}s"
                raise UnknownKeyError(f"{found}; choose from {known}" + did_you_mean("".join(unknown[:1]), known))
            table = table[table[column].isin(wanted)]
    return table


def by_pass(table: pd.DataFrame) -> pd.DataFrame:
    """Pivot one run's table from `read_metrics` to one row per pass over a loader, in time order, and one column per
    metric, with NaN for values that were not logged."""
    place = ["stage", "epoch", "step", "loader"]
    in_time = table.sort_values("step", kind="stable")
    order = in_time.set_index(place).index.unique()
    by_metric = in_time.set_index([*place, "metric"])["value"].unstack("metric")  # sort=False mixes rows up in pandas 2
    return by_metric.loc[order, list(table["metric"].unique())].reset_index(allow_duplicates=True)


def folders_of(logdir: Logdirs) -> Sequence[str | os.PathLike[str]]:
    """Return the folders that were given, one or several."""
    return [logdir] if isinstance(logdir, str | os.PathLike) else logdir


def find_runs(logdir: Logdirs, *, scope: Scope = "loader") -> dict[str, Path]:
    """Return the logdirs of all runs by name, like `read_metrics`: each run once, in the given order.

    Raises:
        FileNotFoundError: there are none.
    """
    folders = [local_copy(each, logs_only=True) for each in folders_of(logdir)]
    found: dict[Path, tuple[str, Path]] = {}
    for folder in folders:
        for path in _logdirs(folder, scope):
            found.setdefault(path.resolve(), (name_in(folder, path), path))
    num_named = Counter(name for name, _ in found.values())
    return {name if num_named[name] == 1 else url_of(path) or path.as_posix(): path for name, path in found.values()}


def _logdirs(folder: Path, scope: Scope) -> list[Path]:
    if not folder.is_dir():
        words = "a file: pass the logdir" if folder.is_file() else "no such folder"
        raise FileNotFoundError(f"{shown(folder)}: {words}")
    tables = {each.parent for each in folder.rglob("csv") if next(_files(each, scope), None) is not None}
    lines = {path.parent for path in folder.rglob(json_lines.FILE) if next(_lines(path, scope), None) is not None}
    logdirs = sorted(tables | lines)
    if not logdirs:
        files = f"csv/<loader>.csv or {json_lines.FILE}"
        found = f"no logs of scope {scope!r} in {shown(folder)}: expected {files} there or below"
        raise FileNotFoundError("; ".join([found, *_first_states(folder)]))
    return logdirs


def _first_states(folder: Path) -> list[str]:
    """Describe the first few runs of a folder that have not finished."""
    statuses = {path: read_status(path) for path in folders_with_status(folder)}
    ended = {path: status for path, status in statuses.items() if status and status["state"] != "finished"}
    return [f"{name_in(folder, path)}: {describe(status)}" for path, status in [*ended.items()][:3]]


def name_in(folder: Path, logdir: Path) -> str:
    """Return the name of a run whose logdir is `folder` or lies in it."""
    if logdir != folder:
        return logdir.relative_to(folder).as_posix()
    url = url_of(folder)
    return folder.resolve().name if url is None else url.rpartition("/")[2]


def _files(folder: Path, scope: Scope) -> Iterator[Path]:
    """Yield the tables of a folder csv, without those of runs in it, their log_table and other programs."""
    for path in sorted(folder.rglob("*.csv")):
        is_own = "csv" not in path.relative_to(folder).parts[:-1]
        if is_own and path.name.endswith(".batch.csv") == (scope == "batch"):
            with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
                if next(csv.reader(file), [])[: len(_PLACE)] == _PLACE:
                    yield path


def _lines(path: Path, scope: Scope) -> Iterator[json_lines.Line]:
    return (line for line, _ in json_lines.read_lines(path) if line[0] == scope)


def _read_lines(run: str, logdir: Path, scope: Scope) -> Iterator[Row]:
    for _, step, metrics in sorted(_lines(logdir / json_lines.FILE, scope), key=lambda line: line[1].loader):
        for metric, value in metrics.items():
            yield run, step.stage, step.loader, step.epoch, step.batch, metric, value


def _read_run(run: str, logdir: Path, scope: Scope) -> Iterator[Row]:
    folder = logdir / "csv"
    if next(_files(folder, scope), None) is None:
        yield from _read_lines(run, logdir, scope)
    for path in _files(folder, scope):
        loader = path.relative_to(folder).as_posix().removesuffix(".csv").removesuffix(".batch")
        content = path.read_bytes()
        try:
            lines = content[: content.rfind(b"\n") + 1].decode()  # a run may be in the middle of the last one
            reader = csv.reader(io.StringIO(lines, newline=""))
            metrics = next(reader, [])[len(_PLACE) :]
            for stage, epoch, step, *cells in reader:
                for metric, cell in zip(metrics, cells, strict=True):
                    if cell:
                        yield run, stage, loader, int(epoch), int(step), metric, float(cell)
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{shown(path)} is damaged, see runnerkit doctor: {error}") from error
