"""A run on one page of HTML: curves, best values, checkpoints, hyperparameters, environment; opens without network."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.curves.best_values import best_metrics, checkpoint_records
from runnerkit.curves.history import find_run, read_metrics
from runnerkit.curves.plot import draw_metrics
from runnerkit.plain_values import flat
from runnerkit.redaction import redacted, redacted_command
from runnerkit.storage.atomic_file import new_file, write_text
from runnerkit.storage.checkpoint_index import Record

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def write_report(logdir: str | os.PathLike[str], *, path: str | os.PathLike[str] | None = None) -> Path:
    """Write what a logdir tells of its run as one HTML file, which needs no other.

    Args:
        logdir: of one run, which may be going on.
        path: where to; by default ``report.html`` in the logdir.
    Returns:
        Where it was written.
    Raises:
        FileNotFoundError: there are no logs.
        ValueError: these are the logs of several runs.
        OSError: it cannot be written there.

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
    path = folder / "report.html" if path is None else Path(path)
    table, records = read_metrics(folder), checkpoint_records(folder)
    html = _template().render(
        run=run,
        extent=f"{table['epoch'].max()} epochs, {table['step'].max():,} training steps",
        curves=_as_uri(draw_metrics(table)),
        metrics=list(table["metric"].unique()),
        values=_values(folder),
        checkpoints=[_checkpoint(folder / "checkpoints", record) for record in records],
        judged=_judged(records),
        hparams=_read_facts(folder / "hparams.yml"),
        environment=_read_facts(folder / "environment.json"),
        passes=_passes(table),
    )
    with new_file(path):
        write_text(path, html)
    return path


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(Path(__file__).parent))
    return environment.get_template("report.html")


def _as_uri(figure: Figure) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.getvalue()).decode()}"


def _values(folder: Path) -> list[list[Any]]:
    """The rows of `best_metrics`; what is not known is None."""
    rows = best_metrics(folder).drop(columns="run").astype(object)
    is_known = rows.notna().assign(last=True)  # a NaN there was logged
    return [list(row) for row in rows.where(is_known, None).itertuples(index=False)]


def _checkpoint(folder: Path, record: Record) -> list[Any]:
    called = ", ".join(alias for alias in ("last", "best") if _is_called(folder / record.name, alias))
    return [
        record.name, called, record.stage, record.epoch, record.batch, record.size_bytes / 1e6, record.score,
    ]  # fmt: skip


def _passes(table: pd.DataFrame) -> list[list[Any]]:
    """A row for each pass over a loader, in time; what was not logged is None, a logged NaN is not."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    columns = ["stage", "epoch", "step", "loader", "metric", "value"]
    for *place, metric, value in table.sort_values("step", kind="stable")[columns].itertuples(index=False):
        cells.setdefault(tuple(place), {})[metric] = value
    metrics = table["metric"].unique()
    return [[*place, *(row.get(metric) for metric in metrics)] for place, row in cells.items()]


def _is_called(path: Path, alias: str) -> bool:
    """Whether `alias` is another name of a checkpoint; a copy, where the file system has no links, is not seen."""
    name = path.with_name(f"{alias}{path.suffix if path.is_file() else ''}")
    return path.exists() and name.exists() and path.samefile(name)


def _judged(records: Sequence[Record]) -> str:
    judge = records[-1].judged_by if records else None
    if judge is None:
        return ""
    better = "smaller" if judge["minimize"] else "larger"
    return f"The score is {judge['metric']} of {judge['loader']}, {better} is better."


def _read_facts(path: Path) -> dict[str, Any]:
    """Read YAML or JSON as one flat dict; empty if there is no such file."""
    if not path.is_file():
        return {}
    import yaml

    text = path.read_text(encoding="utf-8")
    try:
        facts = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    facts = redacted(facts or {})  # also of a run of an earlier version
    if "command" in facts:
        facts["command"] = redacted_command(facts["command"])
    return dict(flat(facts))
