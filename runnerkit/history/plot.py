"""Plots of the metrics of past runs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.errors import UnknownKeyError, did_you_mean
from runnerkit.history.frame import Logdirs, read_metrics, select
from runnerkit.storage.atomic_file import new_file
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.storage.remote.urls import as_url

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_COLUMNS = 3
_WIDTH, _HEIGHT = 5.2, 3.6  # of a subplot, inches
_LINES = ("--", "-", ":", "-.")  # train comes before valid
_MAX_MARKED = 50  # points of a curve; longer curves are drawn without markers


def plot_metrics(
    logdir: Logdirs,
    *,
    path: str | os.PathLike[str] | None = None,
    metrics: Sequence[str] | None = None,
    loaders: Sequence[str] | None = None,
    log_scale: Sequence[str] = (),
) -> Path:
    """Plot each metric in a subplot, with a curve for each loader of each run, and save the figure.

    Args:
        logdir: see ``read_metrics``.
        path: file to write; its suffix (.png, .svg, .pdf) selects the format. By default ``metrics.png`` in the logdir.
        metrics, loaders: names to draw; None draws all.
        log_scale: metrics with a logarithmic axis; values <= 0 leave a gap, and if all are, the axis stays linear.
    Returns:
        The path of the file.
    Raises:
        FileNotFoundError: there are no logs.
        KeyError: no such metric or loader was logged, or one in `log_scale` is not drawn.
        OSError: the file cannot be written.

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
    path = _default_path(logdir) if path is None else path
    figure = draw_metrics(read_metrics(logdir), metrics=metrics, loaders=loaders, log_scale=log_scale)
    with written(path) as local:
        save_figure(figure, local)
    return name_of(path)


def draw_metrics(
    table: pd.DataFrame,
    *,
    metrics: Sequence[str] | None = None,
    loaders: Sequence[str] | None = None,
    log_scale: Sequence[str] = (),
) -> Figure:
    """Draw the figure of :func:`plot_metrics` from a table of ``read_metrics``."""
    figure = new_figure(wanted_by="plot_metrics")
    table = select(table, metrics=metrics, loaders=loaders)
    chosen = list(table["metric"].unique()) if metrics is None else list(metrics)
    if absent := [each for each in log_scale if each not in chosen]:
        found = f"cannot use a logarithmic axis for {absent}, which is not drawn; choose from {chosen}"
        raise UnknownKeyError(found + did_you_mean(absent[0], chosen))
    num_columns = 2 if len(chosen) == 4 else min(len(chosen), _MAX_COLUMNS)
    num_rows = math.ceil(len(chosen) / num_columns)
    figure.set_size_inches(_WIDTH * num_columns, _HEIGHT * num_rows)
    x_name, styles, runs = x_axis(table), _styles(table), table["run"].unique()
    for number, metric in enumerate(chosen, start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        curves = table[table["metric"] == metric]
        if metric in log_scale and (curves["value"] > 0).any():
            axes.set_yscale("log", nonpositive="mask")
        _draw(axes, curves, x_name=x_name, y_name=metric, styles=styles, has_legend=len(runs) == 1)
    if len(runs) > 1:
        lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
        figure.legend(handles=list(lines.values()), loc="outside right upper", frameon=False)
    figure.suptitle(str(runs[0]) if len(runs) == 1 else f"{len(runs)} runs", fontweight="bold")
    return figure


def new_figure(*, wanted_by: str, **options: Any) -> Figure:
    """Create a figure, by default of the size of one subplot, which does not need a display.

    Args:
        wanted_by: name of the function, for the message.
        options: of Matplotlib's ``Figure``.
    Raises:
        ImportError: Matplotlib is not installed; the message names `wanted_by`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{wanted_by} needs Matplotlib: pip install runnerkit[metrics]") from error
    figure = Figure(**{"figsize": (_WIDTH, _HEIGHT), "dpi": 120, "layout": "constrained", **options})
    FigureCanvasAgg(figure)  # no pyplot: no global figures, no display
    return figure


def finish_axes(axes: Axes, *, has_legend: bool = True) -> None:
    """Add a light grid and the legend, and hide the top and right spines."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if has_legend:
        axes.legend(frameon=False)


def save_figure(figure: Figure, path: Path) -> Path:
    """Save in the format of the path's suffix, as PNG without one; create the folder if needed; return `path`.

    Raises:
        ValueError: the format is unknown.
        OSError: the file cannot be written.
    """
    kind = path.suffix[1:].lower() or "png"  # else Matplotlib adds it to the name
    if kind not in (kinds := figure.canvas.get_supported_filetypes()):
        raise ValueError(f"cannot write {path}: unknown format {kind!r}; expected one of {', '.join(kinds)}")
    with new_file(path):
        figure.savefig(path, format=kind)
    return path


def _default_path(logdir: Logdirs) -> str:
    folders = [logdir] if isinstance(logdir, str | os.PathLike) else logdir
    if len(folders) != 1:
        raise ValueError(f"got {len(folders)} folders: choose the output file with path= or -o")
    return os.path.join(as_url(folders[0]) or folders[0], "metrics.png")


def x_axis(table: pd.DataFrame) -> str:
    """Return "epoch", or "step" if loaders were also evaluated within epochs."""
    places = ["run", "stage", "loader", "metric", "epoch"]
    return "step" if table.duplicated(places).any() else "epoch"


def _styles(table: pd.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    """Choose the style of each curve: a color per loader; for several runs, a color per run and a line per loader."""
    from matplotlib import colormaps

    runs, loaders = list(table["run"].unique()), list(table["loader"].unique())
    colored = loaders if len(runs) == 1 else runs
    many = colormaps["turbo"].resampled(len(colored))
    colors: list[Any] = [f"C{number}" if len(colored) <= 10 else many(number) for number in range(len(colored))]
    styles: dict[tuple[str, str], dict[str, Any]] = {}
    for run, loader in dict.fromkeys(zip(table["run"], table["loader"], strict=True)):
        if len(runs) == 1:
            styles[run, loader] = {"label": loader, "color": colors[loaders.index(loader)]}
        else:
            line = _LINES[loaders.index(loader) % len(_LINES)] if len(loaders) > 1 else "-"
            styles[run, loader] = {"label": f"{run}: {loader}", "color": colors[runs.index(run)], "linestyle": line}
    return styles


def _draw(
    axes: Axes,
    table: pd.DataFrame,
    *,
    x_name: str,
    y_name: str,
    styles: dict[tuple[str, str], dict[str, Any]],
    has_legend: bool,
) -> None:
    from matplotlib.ticker import MaxNLocator

    for (run, loader), style in styles.items():
        curve = table[(table["run"] == run) & (table["loader"] == loader)]
        if not curve.empty:
            markers: dict[str, Any] = {"marker": "o", "markersize": 4} if len(curve) <= _MAX_MARKED else {}
            axes.plot(curve[x_name], curve["value"], linewidth=1.6, **style, **markers)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish_axes(axes, has_legend=has_legend)
