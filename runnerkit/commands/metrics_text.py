"""`runnerkit metrics`: the metrics and best epochs of one run, or a comparison of several runs, as text or CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runnerkit.history.best_values import best_metrics, compare_runs, settings_of
from runnerkit.history.frame import Logdirs, by_pass, find_runs, read_metrics, select
from runnerkit.history.run_states import states_of
from runnerkit.storage.status_file import describe, read_status

if TYPE_CHECKING:
    import pandas as pd


def metrics_text(logdir: Logdirs, *, metric: str | None = None, loader: str | None = None, as_csv: bool = False) -> str:
    """Format the metrics of the run, or of the runs, in `logdir` as a table.

    Args:
        logdir: accepted by `read_metrics`.
        metric, loader: of one run, show only these; several runs are compared by them. `compare_runs` has the defaults.
        as_csv: return one machine-readable table with all digits.
    Raises:
        FileNotFoundError: there are no logs.
        KeyError: no such metric or loader was logged.
    """
    runs = find_runs(logdir)
    if len(runs) > 1:
        table = compare_runs(logdir, metric=metric, loader=loader)
        return table.to_csv(index=False) if as_csv else _comparison(table) + _notes(logdir, runs, set(table["run"]))
    chosen = {"metrics": metric and [metric], "loaders": loader and [loader]}
    table = select(read_metrics(logdir), **chosen)
    # As strings from here on, which tell a logged NaN from a value that was not logged.
    passes = by_pass(table.assign(value=table["value"].map(repr if as_csv else "{:.4g}".format)))
    if as_csv:
        return passes.to_csv(index=False)
    best = select(best_metrics(logdir), **chosen).drop(columns="run")
    if best["stage"].nunique() == 1:
        best = best.drop(columns="stage")
    [(run, folder)] = runs.items()
    status = read_status(folder)
    state = f" ({describe(status)})" if status is not None and status["state"] != "finished" else ""
    return f"{run}{state}\n\n{_as_text(passes)}\n\n{_as_text(best)}\n" + _notes(logdir, runs, {run}, but=run)


def _notes(logdir: Logdirs, runs: dict[str, Path], logged: set[str], *, but: str = "") -> str:
    notes = [f"{run}: {state}\n" for run, state in states_of(logdir, runs, logged=logged).items() if run != but]
    return "".join(["\n", *notes]) if notes else ""


def _comparison(table: pd.DataFrame) -> str:
    logged = table.dropna(subset=["metric"]).iloc[0]
    better = f", {logged['better']} is better" if logged["better"] else ""
    unknown = ["smallest", "smallest_epoch", "largest", "largest_epoch"] if better else ["best", "best_epoch"]
    shown = table.drop(columns=["loader", "metric", "better", *unknown])
    settings = settings_of(table)
    shown = shown[["run", *settings, *(each for each in shown if each not in {"run", *settings})]]
    if table["stage"].nunique() == 1:
        shown = shown.drop(columns="stage")
    return f"{logged['metric']} of {logged['loader']}{better}\n\n{_as_text(shown)}\n"


def _as_text(table: pd.DataFrame) -> str:
    is_known = table.notna().assign(last=True) if "last" in table else table.notna()  # a NaN in it was logged
    return table.astype(object).where(is_known, "").to_string(index=False, float_format="{:.4g}".format)
