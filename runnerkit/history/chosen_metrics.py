"""The metrics that plots and reports draw unless they are told which."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runnerkit.history.best_values import checkpoint_records
from runnerkit.history.hyperparameters import environment_of

if TYPE_CHECKING:
    import pandas as pd

_MAX_UNASKED = 4  # metrics that nothing monitors


def monitored_metrics(logdirs: Iterable[Path]) -> set[str]:
    """Return the names of the metrics that selected checkpoints, stopped a run or set a learning rate."""
    monitored: set[str] = set()
    for logdir in logdirs:
        with suppress(ValueError):  # curves do not need the file, which may be damaged
            recorded = environment_of(logdir).get("settings", {}).get("monitored", [])
            # After any slash: keys of loaders and names of metrics may contain one.
            monitored |= {each[place + 1 :] for each in recorded for place, mark in enumerate(each) if mark == "/"}
        monitored |= {record.judged_by["metric"] for record in checkpoint_records(logdir) if record.judged_by}
    return monitored


def default_metrics(table: pd.DataFrame, monitored: set[str]) -> list[str]:
    """Choose the losses and the monitored metrics; without any of these, a few others that change.

    Args:
        table: of ``read_metrics``.
    """
    changing = changing_metrics(table)
    logged = list(table["metric"].unique())
    chosen = [name for name in logged if _is_loss(name) or name in monitored]
    if not monitored & set(logged):
        is_evaluated = ~table["loader"].str.startswith("train")
        evaluated = set(table.loc[is_evaluated, "metric"])
        others = [name for name in changing if name not in chosen and (name in evaluated or not evaluated)]
        chosen += others[: max(0, _MAX_UNASKED - len(chosen))]
    return chosen or changing[:_MAX_UNASKED] or logged[:_MAX_UNASKED]


def changing_metrics(table: pd.DataFrame) -> list[str]:
    """Return the metrics of which a curve is not constant, or is a single point, in the order of logging."""
    curves = table.groupby(["metric", "run", "stage", "loader"], sort=False)["value"]
    is_constant = (curves.nunique(dropna=False) == 1) & (curves.size() > 1)
    constant = is_constant.groupby(level="metric", sort=False).all()
    return [name for name in table["metric"].unique() if not constant[name]]


def _is_loss(name: str) -> bool:
    return name.replace("/", "_").rpartition("_")[2] == "loss"
