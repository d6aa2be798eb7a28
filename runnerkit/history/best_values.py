"""The best values of past runs, and the epochs that reached them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.checkpoints.index import Record, read_index
from runnerkit.history.frame import Logdirs, add_settings, find_runs, read_metrics, select
from runnerkit.history.hyperparameters import differing_settings

if TYPE_CHECKING:
    import pandas as pd

_CURVE = ["run", "stage", "loader", "metric"]
_SUMMARY = ["better", "best", "best_epoch", "last", "smallest", "smallest_epoch", "largest", "largest_epoch"]
_EPOCHS = ["best_epoch", "smallest_epoch", "largest_epoch"]


def best_metrics(logdir: Logdirs) -> pd.DataFrame:
    """Summarize each metric of each loader of each run: its last, smallest and largest value, and the best if known.

    The best value is known for "loss", and for the metric that selected the best checkpoint (``monitor`` and
    ``mode`` of `train`), in all loaders and all given runs.

    Args:
        logdir: see ``read_metrics``.
    Returns:
        Columns run, stage, loader, metric: str; better: "smaller", "larger" or ""; best, last, smallest, largest:
        float64; best_epoch, smallest_epoch, largest_epoch: Int64, the first of equal ones. NaN is ignored, except
        in `last`.
    Raises:
        FileNotFoundError: there are no logs.

    >>> import tempfile
    >>> from runnerkit.logger import Step
    >>> from runnerkit.loggers import CSVLogger
    >>> logger = CSVLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> for epoch, loss in enumerate([0.5, 0.2, 0.3], start=1):
    ...     logger.log_scalars({"loss": loss}, step=Step("train", "valid", epoch, batch=9 * epoch), scope="loader")
    >>> logger.close()
    >>> print(best_metrics(logger.logdir)[["loader", "metric", "better", "best", "best_epoch", "last"]].to_string())
      loader metric   better  best  best_epoch  last
    0  valid   loss  smaller   0.2           2   0.3
    """
    table = read_metrics(logdir)
    import pandas as pd

    minimize = _directions(find_runs(logdir).values())
    rows = [
        {**curve.iloc[0][_CURVE], **_summary(curve, minimize=minimize.get(curve["metric"].iloc[0]))}
        for _, curve in table.groupby(_CURVE, sort=False)
    ]
    return pd.DataFrame(rows, columns=[*_CURVE, *_SUMMARY]).astype(dict.fromkeys(_EPOCHS, "Int64"))


def compare_runs(logdir: Logdirs, *, metric: str | None = None, loader: str | None = None) -> pd.DataFrame:
    """Compare runs by one metric of one loader: the rows of `best_metrics`, the best run first.

    Args:
        logdir: see ``read_metrics``.
        metric, loader: by default the pair that selected the best checkpoints, if it is the same in all runs; else
            "loss" and "valid", if they were logged; else the first ones.
    Returns:
        One row per run (and stage), with NaN for a run that did not log the metric, and a column for each
        hyperparameter and recorded setting in which the runs differ, as in ``read_metrics``. The rows are in the order
        of `logdir` if it is unknown whether smaller or larger is better.
    Raises:
        FileNotFoundError: there are no logs.
        KeyError: no run logged this metric or loader.
    """
    summary = best_metrics(logdir)
    import pandas as pd

    found = find_runs(logdir)
    selections = {(each["loader"], each["metric"]) for each in _selections(found.values())}
    selection = selections.pop() if len(selections) == 1 else ("valid", "loss")
    loader = loader or _default(selection[0], known=list(summary["loader"]))
    of_loader = select(summary, loaders=[loader])
    metric = metric or _default(selection[1], known=list(of_loader["metric"]))
    runs = pd.DataFrame({"run": summary["run"].unique()})
    rows = runs.merge(select(summary, loaders=[loader], metrics=[metric]), how="left", on="run")
    rows = add_settings(rows, differing_settings(found, reserved=frozenset({*_SUMMARY, "status"})))  # of JSON
    known = set(rows["better"].dropna())
    return rows if known == {""} else rows.sort_values("best", ascending=known == {"smaller"}, kind="stable")


def settings_of(rows: pd.DataFrame) -> list[str]:
    """Return the columns of a table of `compare_runs` for what differs between the runs; the summary precedes them."""
    return list(rows.columns[list(rows.columns).index(_SUMMARY[-1]) + 1 :])


def without_missing(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of `compare_runs` or `best_metrics` as objects, with None for unknown values.

    A NaN that was logged stays.
    """
    is_known = rows.notna()
    is_known["last"] = rows["metric"].notna()
    return rows.astype(object).where(is_known, None)


def _default(wanted: str, *, known: list[str]) -> str:
    return wanted if wanted in known or not known else known[0]


def _summary(curve: pd.DataFrame, *, minimize: bool | None) -> dict[str, Any]:
    summary: dict[str, Any] = {"last": curve["value"].iloc[-1], "better": ""}
    numbers = [each for each in zip(curve["value"], curve["epoch"], strict=True) if not math.isnan(each[0])]
    if numbers:
        summary["smallest"], summary["smallest_epoch"] = min(numbers, key=itemgetter(0))
        summary["largest"], summary["largest_epoch"] = max(numbers, key=itemgetter(0))
    if minimize is not None:
        name = "smallest" if minimize else "largest"
        summary |= {
            "better": "smaller" if minimize else "larger",
            "best": summary.get(name),
            "best_epoch": summary.get(f"{name}_epoch"),
        }
    return summary


def _directions(logdirs: Iterable[Path]) -> dict[str, bool]:
    """Map each metric to True if smaller is better; metrics on which the runs disagree are omitted."""
    directions = {"loss": {True}}
    for selection in _selections(logdirs):
        directions.setdefault(selection["metric"], set()).add(selection["minimize"])
    return {metric: minimize.pop() for metric, minimize in directions.items() if len(minimize) == 1}


def _selections(logdirs: Iterable[Path]) -> list[dict[str, Any]]:
    return [record.judged_by for logdir in logdirs for record in checkpoint_records(logdir) if record.judged_by]


def checkpoint_records(logdir: Path) -> list[Record]:
    """Read the index of a run's checkpoints, oldest first; empty if it cannot be read, see `runnerkit doctor`."""
    with suppress(OSError, ValueError):
        return read_index(logdir / "checkpoints" / "index.json")
    return []
