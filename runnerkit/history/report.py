"""HTML reports of runs: curves, best values, checkpoints, hyperparameters and environment on one offline page."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.checkpoints.index import Record
from runnerkit.history.best_values import best_metrics, checkpoint_records
from runnerkit.history.frame import find_run, read_metrics
from runnerkit.history.plot import draw_metrics
from runnerkit.storage.atomic_file import new_file, write_text
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.storage.remote.urls import shown
from runnerkit.support.plain_values import flat
from runnerkit.support.redaction import redacted, redacted_command

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def write_report(logdir: str | os.PathLike[str], *, path: str | os.PathLike[str] | None = None) -> Path:
    """Write a report of a run as one self-contained HTML file.

    Args:
        logdir: folder of one run, which may still be training.
        path: file to write; by default ``report.html`` in the logdir.
    Returns:
        The path of the file.
    Raises:
        FileNotFoundError: there are no logs.
        ValueError: the folder contains several runs.
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
    run, folder = find_run(logdir)
    path = os.path.join(shown(folder), "report.html") if path is None else path
    table, records = read_metrics(folder), checkpoint_records(folder)
    html = _template().render(
        run=run,
        extent=f"{table['epoch'].max()} epochs, {table['step'].max():,} training steps",
        curves=_as_uri(draw_metrics(table)),
        metrics=list(table["metric"].unique()),
        values=_values(folder),
        checkpoints=[_checkpoint(folder / "checkpoints", record) for record in records],
        judged=_selected_by(records),
        hparams=_read_facts(folder / "hparams.yml"),
        environment=_read_facts(folder / "environment.json"),
        passes=_passes(table),
    )
    with written(path) as local, new_file(local):
        write_text(local, html)
    return name_of(path)


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(Path(__file__).parent))
    return environment.get_template("report.html")


def _as_uri(figure: Figure) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.getvalue()).decode()}"


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


def _read_facts(path: Path) -> dict[str, Any]:
    """Read YAML or JSON as one flat dict; empty if the file does not exist."""
    if not path.is_file():
        return {}
    import yaml

    text = path.read_text(encoding="utf-8")
    try:
        facts = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    facts = redacted(facts or {})  # files of earlier versions may contain secrets
    if "command" in facts:
        facts["command"] = redacted_command(facts["command"])
    return dict(flat(facts))
