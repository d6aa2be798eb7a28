"""The view of a run in a notebook: its state, a table of the last metrics, and their curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape

from runnerkit.history.curve_svg import color_of, curve_svg
from runnerkit.types import Metrics

Epochs = Mapping[int, Mapping[str, Metrics]]  # {epoch: {loader: {metric: value}}}

MOST_ROWS = 20  # of the table
MOST_CURVES = 4
_LONGEST = 60  # characters of a name
_LONGEST_MESSAGE = 2000  # characters of an error

_CELL = "padding: 0.15em 1.2em 0.15em 0; border: 0; border-bottom: 1px solid #8886; text-align: left; font: inherit"


def html_of(name: str, state: str, *, failure: str, epochs: Epochs) -> str:
    """Return HTML that describes a run.

    It needs neither scripts nor files, is complete without a style sheet, and has the colors of the page around it.
    All names are escaped.

    Args:
        name: of the runner.
        state: how far the run is, in one line.
        failure: of a run that failed, the exception in words.
        epochs: the metrics.
    """
    loaders = list(dict.fromkeys(loader for metrics in epochs.values() for loader in metrics))
    parts = [
        f"<strong>{_name(name)}</strong> <span>{escape(state)}</span>",
        _failure(failure),
        _table(epochs, loaders),
        _curves(epochs, loaders),
    ]
    html = f'<div class="runnerkit-run" style="font-size: 13px; line-height: 1.5">{"".join(parts)}</div>'
    return html.encode(errors="replace").decode()  # a file's name may contain what a notebook cannot store


def _failure(message: str) -> str:
    if not message:
        return ""
    style = "margin: 0.5em 0; white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace"
    return f'<div style="{style}">{escape(_shortened(message, _LONGEST_MESSAGE))}</div>'


def _table(epochs: Epochs, loaders: Iterable[str]) -> str:
    """Return a row for each metric, and a column for each loader with the values of its last pass."""
    last = {loader: max(epoch for epoch, metrics in epochs.items() if loader in metrics) for loader in loaders}
    columns = {loader: _shown(epochs[epoch][loader]) for loader, epoch in last.items()}
    metrics = _loss_first(metric for values in columns.values() for metric in values)
    if not metrics:
        return ""
    heads = "".join(
        f'<th scope="col" style="{_CELL}">{_mark(index)}{_name(loader)}, epoch {epoch:,}</th>'
        for index, (loader, epoch) in enumerate(last.items())
    )
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL}">{_name(metric)}</th>'
        f"{''.join(_cell(values.get(metric)) for values in columns.values())}</tr>"
        for metric in metrics[:MOST_ROWS]
    )
    table = (
        f'<table style="border-collapse: collapse; margin: 0.5em 0; color: inherit">'
        f'<thead><tr><th scope="col" style="{_CELL}">metric</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )
    return table + _rest(len(metrics) - MOST_ROWS, "metrics")


def _curves(epochs: Epochs, loaders: Iterable[str]) -> str:
    """Return the curves of the loss and of metrics that change; constant ones only if nothing changes."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for epoch, metrics in sorted(epochs.items()):
        for loader, values in metrics.items():
            for metric, value in _shown(values).items():
                curves = found.setdefault(metric, {each: [] for each in loaders})
                curves[loader].append((epoch, value))
    changing = {metric: curves for metric, curves in found.items() if _changes(curves)} or found
    ordered = _loss_first(changing)
    drawn = "".join(curve_svg(_shortened(metric), changing[metric]) for metric in ordered[:MOST_CURVES])
    if not drawn:
        return ""
    panels = f'<div style="display: flex; flex-wrap: wrap; gap: 0.5em 1em">{drawn}</div>'
    return panels + _rest(len(ordered) - MOST_CURVES, "curves")


def _loss_first(metrics: Iterable[str]) -> list[str]:
    return sorted(dict.fromkeys(metrics), key=lambda metric: metric != "loss")


def _changes(curves: Mapping[str, list[tuple[float, float]]]) -> bool:
    return any(len({value for _, value in points if math.isfinite(value)}) > 1 for points in curves.values())


def _shown(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if not name.startswith("_")}


def _mark(index: int) -> str:
    """Return a square in the color of a loader's curves."""
    return f'<span style="color: {color_of(index)}" aria-hidden="true">&#9632;</span> '


def _cell(value: float | None) -> str:
    style = f"{_CELL}; font-variant-numeric: tabular-nums"
    if value is None:
        return f'<td style="{style}"></td>'
    return f'<td style="{style}" title="{escape(repr(value))}">{escape(f"{value:.4g}")}</td>'


def _rest(number: int, kind: str) -> str:
    return f"<div>and {number:,} more {kind}</div>" if number > 0 else ""


def _name(text: str) -> str:
    return escape(_shortened(text))


def _shortened(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
