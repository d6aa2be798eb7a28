"""Plots of the metrics of past runs."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runnerkit.errors import UnknownKeyError, did_you_mean
from runnerkit.history.chosen_metrics import changing_metrics, default_metrics, monitored_metrics
from runnerkit.history.frame import Logdirs, find_runs, folders_of, read_metrics, select
from runnerkit.storage.atomic_file import new_file, write_text
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.storage.remote.urls import as_url

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_COLUMNS = 3
_WIDTH, _HEIGHT = 5.2, 3.6  # of a subplot, inches
_SMALL = (4.4, 2.9)  # of a figure of one metric
LINES = ("--", "-", ":", "-.")  # train comes before valid
_MAX_MARKED = 50  # points of a curve; longer curves are drawn without markers


def plot_metrics(
    logdir: Logdirs,
    *,
    path: str | os.PathLike[str] | None = None,
    metrics: Sequence[str] | Literal["all"] | None = None,
    loaders: Sequence[str] | None = None,
    log_scale: Sequence[str] = (),
) -> Path:
    """Plot metrics in subplots, with a curve for each loader of each run, and save the figure.

    Args:
        logdir: see ``read_metrics``.
        path: file to write; its suffix (.png, .svg, .pdf) selects the format. By default ``metrics.png`` in the logdir.
            An SVG has one column of subplots and the width of the page that shows it, so that a phone can.
        metrics: names to draw; None draws the losses and the monitored metrics (those that selected checkpoints or
            stopped the run), or some others without any; "all" draws each that is not constant,
            or all if none changes.
        loaders: names to draw; None draws all.
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
    path = default_path(logdir, "metrics.png") if path is None else path
    table = select(read_metrics(logdir), metrics=None if metrics == "all" else metrics, loaders=loaders)
    if metrics is None:
        metrics = [*default_metrics(table, monitored_metrics(find_runs(logdir).values()))]
        metrics += [each for each in log_scale if each not in metrics]
    elif metrics == "all":
        metrics = changing_metrics(table) or list(table["metric"].unique())
    max_columns = 1 if Path(path).suffix.lower() == ".svg" else _MAX_COLUMNS
    figure = draw_metrics(table, metrics=metrics, log_scale=log_scale, max_columns=max_columns)
    with written(path) as local:
        save_figure(figure, local)
    return name_of(path)


def draw_metrics(
    table: pd.DataFrame, *, metrics: Sequence[str], log_scale: Sequence[str] = (), max_columns: int = _MAX_COLUMNS
) -> Figure:
    """Draw the figure of :func:`plot_metrics` from a table of ``read_metrics``."""
    figure = new_figure(wanted_by="plot_metrics")
    table, chosen = select(table, metrics=metrics), list(metrics)
    if absent := [each for each in log_scale if each not in chosen]:
        found = f"cannot use a logarithmic axis for {absent}, which is not drawn; choose from {chosen}"
        raise UnknownKeyError(found + did_you_mean(absent[0], chosen))
    num_columns = min(2 if len(chosen) == 4 else len(chosen), max_columns)
    num_rows = math.ceil(len(chosen) / num_columns)
    figure.set_size_inches(_WIDTH * num_columns, _HEIGHT * num_rows)
    x_name, styles, runs = x_axis(table), curve_styles(table), table["run"].unique()
    for number, metric in enumerate(chosen, start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        curves = table[table["metric"] == metric]
        if metric in log_scale and (curves["value"] > 0).any():
            axes.set_yscale("log", nonpositive="mask")
        _draw(axes, curves, x_name=x_name, y_name=metric, styles=styles, has_legend=len(runs) == 1)
    if len(runs) > 1:
        lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
        figure.legend(handles=list(lines.values()), loc="outside right upper", frameon=False)
    figure.suptitle(literal(runs[0]) if len(runs) == 1 else f"{len(runs)} runs", fontweight="bold")
    return figure


def draw_metric(
    table: pd.DataFrame, metric: str, *, styles: dict[tuple[str, str], dict[str, Any]], has_legend: bool
) -> Figure:
    """Draw the curves of one metric in a figure that is legible on a phone.

    Args:
        table: of ``read_metrics``.
        styles: see :func:`curve_styles`.
    """
    figure = new_figure(wanted_by="write_report", figsize=_SMALL)
    curves = table[table["metric"] == metric]
    axes = figure.add_subplot()
    _draw(axes, curves, x_name=x_axis(table), y_name="", styles=styles, has_legend=has_legend)
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


def literal(text: str) -> str:
    """Return text in which Matplotlib finds no formula, which two dollar signs would enclose.

    >>> print(literal("$0-$10"))
    \\$0-\\$10
    """
    return text.replace("$", r"\$")


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
        if kind == "svg":
            write_text(path, svg_of(figure))
        else:
            figure.savefig(path, format=kind)
    return path


def svg_of(figure: Figure) -> str:
    """Return the figure as SVG, which takes the width of its page, up to its own, and keeps its proportions."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    size, relative = r'width="([\d.]+pt)" height="[\d.]+pt"', r'width="100%" style="max-width: \1; height: auto"'
    return re.sub(size, relative, text.getvalue(), count=1)  # the first is that of the root; its viewBox stays


def default_path(logdir: Logdirs, name: str) -> str:
    """Return the path of a file that is written into the only folder of `logdir`.

    Raises:
        ValueError: there are several.
    """
    folders = folders_of(logdir)
    if len(folders) != 1:
        raise ValueError(f"got {len(folders)} folders: choose the output file with path= or -o")
    return os.path.join(as_url(folders[0]) or folders[0], name)


def x_axis(table: pd.DataFrame) -> str:
    """Return "epoch", or "step" if loaders were also evaluated within epochs."""
    places = ["run", "stage", "loader", "metric", "epoch"]
    return "step" if table.duplicated(places).any() else "epoch"


def curve_styles(table: pd.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    """Choose the style of the curve of each run and loader, options of Matplotlib's ``plot``.

    One run has a color per loader; several have a color per run and a line style per loader.
    """
    from matplotlib import colormaps

    runs, loaders = list(table["run"].unique()), list(table["loader"].unique())
    colored = loaders if len(runs) == 1 else runs
    many = colormaps["turbo"].resampled(len(colored))
    colors: list[Any] = [f"C{number}" if len(colored) <= 10 else many(number) for number in range(len(colored))]
    styles: dict[tuple[str, str], dict[str, Any]] = {}
    for run, loader in dict.fromkeys(zip(table["run"], table["loader"], strict=True)):
        if len(runs) == 1:
            styles[run, loader] = {"label": literal(loader), "color": colors[loaders.index(loader)]}
        else:
            line = LINES[loaders.index(loader) % len(LINES)] if len(loaders) > 1 else "-"
            label = literal(f"{run}: {loader}")
            styles[run, loader] = {"label": label, "color": colors[runs.index(run)], "linestyle": line}
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
    axes.set_ylabel(literal(y_name))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish_axes(axes, has_legend=has_legend)
