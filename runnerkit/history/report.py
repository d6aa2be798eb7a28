"""HTML reports of a run, or of several to compare: one offline page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.checkpoints.index import Record
from runnerkit.history import page
from runnerkit.history.best_values import best_metrics, checkpoint_records
from runnerkit.history.chosen_metrics import changing_metrics, default_metrics, monitored_metrics
from runnerkit.history.comparison import comparison_page
from runnerkit.history.frame import Logdirs, find_runs, read_metrics
from runnerkit.history.hyperparameters import environment_of, hparams_of
from runnerkit.history.plot import curve_styles, default_path
from runnerkit.storage.atomic_file import new_file, write_text
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.storage.remote.urls import shown

if TYPE_CHECKING:
    import pandas as pd


def write_report(logdir: Logdirs, *, path: str | os.PathLike[str] | None = None) -> Path:
    """Write a report of a run, or a comparison of several, as one self-contained HTML file.

    Args:
        logdir: see ``read_metrics``; runs may still be training.
        path: file to write; by default ``report.html`` in the only folder of `logdir`.
    Returns:
        The path of the file.
    Raises:
        FileNotFoundError: there are no logs.
        ValueError: several folders are given without `path`, or a run's settings cannot be read.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> from runnerkit.logger import Step
    >>> from runnerkit.loggers import CSVLogger
    >>> logger = CSVLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> logger.log_scalars({"loss": 0.5}, step=Step("train", "train", epoch=1, batch=9), scope="loader")
    >>> logger.close()
    >>> write_report(logger.logdir).name
    'report.html'
    """
    runs = find_runs(logdir)
    path = _default_path(logdir, runs) if path is None else path
    html = _page_of_run(*next(iter(runs.items()))) if len(runs) == 1 else comparison_page(logdir)
    with written(path) as local, new_file(local):
        write_text(local, html)
    return name_of(path)


def _default_path(logdir: Logdirs, runs: dict[str, Path]) -> str:
    if len(runs) == 1:
        return os.path.join(shown(next(iter(runs.values()))), "report.html")
    return default_path(logdir, "report.html")


def _page_of_run(run: str, folder: Path) -> str:
    table, records, environment = read_metrics(folder), checkpoint_records(folder), environment_of(folder)
    chosen = default_metrics(table, monitored_metrics([folder]))
    others = [name for name in changing_metrics(table) if name not in chosen]
    styles = curve_styles(table)
    curves = page.pictures(table, chosen, styles=styles, has_legend=True)
    more_curves = page.pictures(table, others, styles=styles, has_legend=True)
    drawn = {name for name, _ in curves + more_curves}
    metrics = list(table["metric"].unique())
    return page.render(
        "report.html",
        title=run,
        extent=f"{table['epoch'].max()} epochs, {table['step'].max():,} training steps",
        curves=curves,
        more_curves=more_curves,
        not_drawn=[name for name in metrics if name not in drawn],
        metrics=metrics,
        values=_values(folder),
        checkpoints=[_checkpoint(folder / "checkpoints", record) for record in records],
        judged=_selected_by(records),
        hparams=hparams_of(folder),
        settings=page.settings_of(environment),
        environment=page.facts_of(environment),
        diff=page.diff_of(environment),
        passes=_passes(table),
    )


def _values(folder: Path) -> list[list[Any]]:
    """Return the rows of `best_metrics`, with None for unknown values."""
    rows = best_metrics(folder).drop(columns="run").astype(object)
    is_known = rows.notna().assign(last=True)  # a NaN there was logged
    return [list(row) for row in rows.where(is_known, None).itertuples(index=False)]


def _checkpoint(folder: Path, record: Record) -> list[Any]:
    called = ", ".join(alias for alias in ("last", "best") if _is_called(folder / record.name, alias))
    return [
        record.name, called, record.stage, record.epoch, record.batch, record.size_bytes / 1e6, record.score,
    ]  # fmt: skip


def _passes(table: pd.DataFrame) -> list[list[Any]]:
    """Return a row for each pass over a loader, in time order; None marks values that were not logged, unlike NaN."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    columns = ["stage", "epoch", "step", "loader", "metric", "value"]
    for *place, metric, value in table.sort_values("step", kind="stable")[columns].itertuples(index=False):
        cells.setdefault(tuple(place), {})[metric] = value
    metrics = table["metric"].unique()
    return [[*place, *(row.get(metric) for metric in metrics)] for place, row in cells.items()]


def _is_called(path: Path, alias: str) -> bool:
    """Check if `alias` is a link to a checkpoint; copies, on file systems without links, are not recognized."""
    name = path.with_name(f"{alias}{path.suffix if path.is_file() else ''}")
    return path.exists() and name.exists() and path.samefile(name)


def _selected_by(records: Sequence[Record]) -> str:
    selection = records[-1].judged_by if records else None
    if selection is None:
        return ""
    better = "smaller" if selection["minimize"] else "larger"
    return f"The score is {selection['metric']} of {selection['loader']}; {better} is better."
