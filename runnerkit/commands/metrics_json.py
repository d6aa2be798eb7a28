"""`runnerkit metrics --json`: the metrics, best epochs and status of one run, or a comparison of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.history.best_values import best_metrics, compare_runs, without_missing
from runnerkit.history.frame import Logdirs, find_runs, read_metrics, select
from runnerkit.history.run_states import all_runs
from runnerkit.storage.status_file import read_status

if TYPE_CHECKING:
    import pandas as pd

_PLACE = ["stage", "loader", "epoch", "step"]


def metrics_json(logdir: Logdirs, *, metric: str | None = None, loader: str | None = None) -> dict[str, Any]:
    """Return what `metrics_text` prints, with all digits, and the status of each run.

    Raises:
        as `metrics_text`.
    """
    runs = all_runs(logdir, find_runs(logdir))
    if len(runs) > 1:
        return _comparison(compare_runs(logdir, metric=metric, loader=loader), runs)
    [(run, folder)] = runs.items()
    chosen = {"metrics": metric and [metric], "loaders": loader and [loader]}
    table = select(read_metrics(logdir), **chosen).sort_values("step", kind="stable")
    passes = [
        {**dict(zip(_PLACE, place, strict=True)), "metrics": dict(zip(rows["metric"], rows["value"], strict=True))}
        for place, rows in table.groupby(_PLACE, sort=False)
    ]
    best = select(best_metrics(logdir), **chosen)
    return {"run": run, "status": read_status(folder), "passes": passes, "best": _rows(best.drop(columns="run"))}


def _comparison(table: pd.DataFrame, runs: dict[str, Path]) -> dict[str, Any]:
    logged = table.dropna(subset=["metric"]).iloc[0]
    rows, unknown = _rows(table), dict.fromkeys(map(str, table.columns))
    rows += [{**unknown, "run": run} for run in runs if run not in set(table["run"])]
    rows = [{**row, "status": read_status(runs[row["run"]])} for row in rows]
    return {"metric": logged["metric"], "loader": logged["loader"], "runs": rows}


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in without_missing(table).to_dict("records")]
