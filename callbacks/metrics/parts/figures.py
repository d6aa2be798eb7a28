"""Figures of matrices, curves and tables; they need Matplotlib, and no display."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runnerkit.history.plot import finish_axes, literal, new_figure
from runnerkit.logger import takes

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

MAX_CLASSES = 50  # whose names can be read in a figure
MAX_CURVES = 20
_MAX_NUMBERS = 20 * 20  # of a matrix: Matplotlib draws about 1,000 in a second
_MAX_INCHES = 14
_CELL = 0.6  # of a matrix, inches
_ROW = 0.25  # of a table, inches


def log_drawn(runner: IRunner, tag: str, draw: Callable[[], Figure]) -> None:
    """Log a figure if a logger accepts images; without Matplotlib, warn."""
    if not takes(runner.loggers, "log_image"):
        return
    try:
        figure = draw()
    except ImportError:
        logger.warning("no image of %r without Matplotlib: pip install runnerkit[metrics]", tag)
        return
    runner.log_figure(tag, figure)


def draw_matrix(
    numbers: np.ndarray, *, names: Sequence[str], title: str, is_fraction: bool, options: Mapping[str, Any]
) -> Figure:
    """Draw a (C, C) matrix of true classes in rows: up to 20 classes with numbers, up to 50 with names.

    Args:
        is_fraction: show two decimals.
        options: of Matplotlib's ``Figure``.
    """
    size, names = len(names), [*map(literal, names)]
    inches = min(2 + _CELL * size, _MAX_INCHES)
    figure = new_figure(wanted_by="a confusion matrix", **{"figsize": (inches, inches), "dpi": 100, **options})
    axes = figure.add_subplot(xlabel="predicted", ylabel="true", title=literal(title))
    image = axes.imshow(numbers, cmap="Blues")
    if size <= MAX_CLASSES:
        axes.set_xticks(range(size), names, rotation=90)
        axes.set_yticks(range(size), names)
    if numbers.size > _MAX_NUMBERS:
        figure.colorbar(image, shrink=0.8)
        return figure
    middle = numbers.max(initial=0) / 2
    for row, of_row in enumerate(numbers.tolist()):
        for column, number in enumerate(of_row):
            text = f"{number:.2f}" if is_fraction else f"{number:.0f}"
            axes.text(column, row, text, ha="center", va="center", color="white" if number > middle else "black")
    return figure


def draw_curves(curves: Mapping[str, Mapping[str, Sequence[float]]], *, title: str) -> Figure:
    """Draw the ROC curve and the precision-recall curve of each class.

    Args:
        curves: by class, the lists of :func:`~runnerkit.metrics.roc_curve`.
    """
    figure = new_figure(wanted_by="curves")
    width, height = figure.get_size_inches()
    figure.set_size_inches(2 * width, height)
    roc = figure.add_subplot(1, 2, 1, xlabel="false positive rate", ylabel="true positive rate", title=literal(title))
    recall = figure.add_subplot(1, 2, 2, xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
    roc.plot([0, 1], [0, 1], color="gray", linewidth=0.8, linestyle=":")  # a random classifier
    for name, curve in curves.items():
        roc.plot([0, *curve["false_positive_rate"]], [0, *curve["true_positive_rate"]], linewidth=1.2)
        recall.plot(curve["true_positive_rate"], curve["precision"], linewidth=1.2, label=literal(name))
    finish_axes(roc, has_legend=False)
    finish_axes(recall, has_legend=False)
    if curves:
        figure.legend(loc="outside right upper", frameon=False, ncols=1 + len(curves) // 16)
    return figure


def draw_table(columns: Mapping[str, Sequence[str | float]], *, title: str) -> Figure:
    """Draw a table of strings, integers, and floats in [0, 1], which are colored by their value."""
    figure = new_figure(wanted_by="a table")
    from matplotlib.transforms import Bbox

    names, rows = list(columns), list(zip(*columns.values(), strict=True))
    width, _ = figure.get_size_inches()
    figure.set_size_inches(width, 0.6 + _ROW * (1 + len(rows)))
    axes = figure.add_subplot(title=literal(title))
    axes.axis("off")
    texts = [[f"{each:.4f}" if isinstance(each, float) else literal(str(each)) for each in row] for row in rows]
    table = axes.table(texts, colLabels=[*map(literal, names)], cellLoc="right", bbox=Bbox.unit())
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (row, column), cell in table.get_celld().items():
        cell.set_linewidth(0.3)
        value = rows[row - 1][column] if row else ""
        if isinstance(value, float) and value == value:
            cell.set_facecolor((1 - 0.5 * value, 1 - 0.25 * value, 1.0))
    return figure
