"""Curves of past runs as one picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.history import read_metrics

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_COLUMNS = 3
_WIDTH, _HEIGHT = 5.2, 3.6  # of a subplot, inches
_MAX_MARKED = 50  # points of a curve that are still told apart by markers


def plot_metrics(
    logdir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    path: str | os.PathLike[str] | None = None,
    metrics: Sequence[str] | None = None,
) -> Path:
    """Draw a subplot for each metric, in it a curve for each loader of each run, and save it as a PNG.

    Args:
        logdir: what ``read_metrics`` takes.
        path: where to save; by default ``metrics.png`` in the logdir.
        metrics: which to draw; None is all.
    Returns:
        Where it was saved.
    Raises:
        FileNotFoundError: there are no logs.
        KeyError: no such metric was logged.

    >>> import tempfile
    >>> from runnerkit.logger import Step
    >>> from runnerkit.loggers import CSVLogger
    >>> logger = CSVLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> logger.log_scalars({"loss": 0.5}, step=Step("train", "train", epoch=1, batch=9), scope="loader")
    >>> logger.close()
    >>> plot_metrics(logger.logdir).name
    'metrics.png'
    """
    figure = new_figure(wanted_by="plot_metrics")
    path = _default_path(logdir) if path is None else Path(path)
    table = read_metrics(logdir)
    chosen = _choose(metrics, known=list(dict.fromkeys(table["metric"])))
    table = table[table["metric"].isin(chosen)]
    num_columns = 2 if len(chosen) == 4 else min(len(chosen), _MAX_COLUMNS)
    num_rows = math.ceil(len(chosen) / num_columns)
    figure.set_size_inches(_WIDTH * num_columns, _HEIGHT * num_rows)
    x_name, colors = _x_name(table), _colors(table)
    for number, metric in enumerate(chosen, start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        _draw(axes, table[table["metric"] == metric], x_name=x_name, y_name=metric, colors=colors)
    runs = table["run"].unique()
    figure.suptitle(str(runs[0]) if len(runs) == 1 else f"{len(runs)} runs", fontweight="bold")
    return save(figure, path)


def new_figure(*, wanted_by: str) -> Figure:
    """Make a figure of one subplot's size, of no display.

    Raises:
        ImportError: Matplotlib is not installed; `wanted_by` is who needs it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{wanted_by} needs Matplotlib: pip install runnerkit[metrics]") from error
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: no global figures, no display
    return figure


def finish_axes(axes: Axes) -> None:
    """Add a faint grid and the legend; leave out the frame's upper and right side."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def save(figure: Figure, path: Path) -> Path:
    """Save as a PNG, in a folder that is made if need be; return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _default_path(logdir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Path:
    if not isinstance(logdir, str | os.PathLike):
        raise ValueError("several folders were given: pass path= to say where the picture goes")
    return Path(logdir) / "metrics.png"


def _choose(metrics: Sequence[str] | None, *, known: list[str]) -> list[str]:
    chosen = known if metrics is None else list(metrics)
    unknown = [metric for metric in chosen if metric not in known]
    if unknown or not chosen:
        raise KeyError(f"metrics {unknown} were not logged; choose from {known}")
    return chosen


def _x_name(table: pd.DataFrame) -> str:
    """Curves go by epoch, unless loaders were evaluated within epochs."""
    places = ["run", "stage", "loader", "metric", "epoch"]
    return "step" if table.duplicated(places).any() else "epoch"


def _colors(table: pd.DataFrame) -> dict[tuple[str, str], str]:
    """A color for each curve, the same in all subplots."""
    curves = dict.fromkeys(zip(table["run"], table["loader"], strict=True))
    return {curve: f"C{number % 10}" for number, curve in enumerate(curves)}


def _draw(axes: Axes, table: pd.DataFrame, *, x_name: str, y_name: str, colors: dict[tuple[str, str], str]) -> None:
    from matplotlib.ticker import MaxNLocator

    has_runs = len({run for run, _ in colors}) > 1
    for (run, loader), color in colors.items():
        curve = table[(table["run"] == run) & (table["loader"] == loader)]
        if not curve.empty:
            style: dict[str, Any] = {"marker": "o", "markersize": 4} if len(curve) <= _MAX_MARKED else {}
            label = f"{run}: {loader}" if has_runs else loader
            axes.plot(curve[x_name], curve["value"], color=color, linewidth=1.6, label=label, **style)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish_axes(axes)
