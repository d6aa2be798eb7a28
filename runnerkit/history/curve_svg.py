"""Small curves as inline SVG, drawn without other packages, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from operator import itemgetter

Points = Sequence[tuple[float, float]]

# Each has a contrast of at least 3.7 with white and with the backgrounds of dark notebooks, #111 and #1e1e1e.
COLORS = ("#2f7fd1", "#d2601a", "#2a9455", "#b255c4", "#98801f", "#d4527e", "#3a8ea8", "#7d7d7d")
MOST_POINTS = 200  # of a curve; twice as many as its pixels show

_WIDTH, _HEIGHT = 280, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 272, 24, 130  # of the area of the curves


def curve_svg(title: str, curves: Mapping[str, Points]) -> str:
    """Return an SVG element that draws curves over one another, colored in the order of `curves`.

    The text has the color of the page. Axes are labeled with their limits.

    Args:
        title: drawn above; any text.
        curves: (x, y) of each curve by its name, x ascending; a y that is not finite leaves a gap.

    >>> curve_svg("loss", {"train": [(1, 0.5), (2, 0.25)]}).count("<polyline")
    1
    """
    finite = [point for points in curves.values() for point in points if math.isfinite(point[1])]
    xs, ys = ([point[axis] for point in finite] or [0.0] for axis in (0, 1))
    (x_min, x_max), (y_min, y_max) = (min(xs), max(xs)), (min(ys), max(ys))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = _part(point[0], x_min, x_max), _part(point[1], y_min, y_max)
        return _LEFT + x * (_RIGHT - _LEFT), _BOTTOM - y * (_BOTTOM - _TOP)

    labels = [
        _text(title, _LEFT, _TOP - 10, anchor="start", size=12),
        _text(f"{y_max:.4g}", _LEFT - 5, _TOP + 4, anchor="end"),
        _text(f"{x_min:.10g}", _LEFT, _BOTTOM + 14, anchor="start"),
    ]
    if y_max > y_min:
        labels.append(_text(f"{y_min:.4g}", _LEFT - 5, _BOTTOM + 4, anchor="end"))
    if x_max > x_min:
        labels.append(_text(f"{x_max:.10g}", _RIGHT, _BOTTOM + 14, anchor="end"))
    axes = f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>'
    lines = [
        _line([place(point) for point in run], color_of(index))
        for index, points in enumerate(curves.values())
        for run in _unbroken(points)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(f"curves of {title}")}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" style="max-width: 100%">'
        f"{axes}{''.join(labels)}{''.join(lines)}</svg>"
    )


def color_of(index: int) -> str:
    """Return the color of a curve by its position."""
    return COLORS[index % len(COLORS)]


def _part(value: float, low: float, high: float) -> float:
    """Return the position of `value` between the limits, from 0 to 1; the middle if they are equal."""
    if not high > low:
        return 0.5
    if math.isinf(high - low):
        value, low, high = value / 2, low / 2, high / 2
    return (value - low) / (high - low)


def _unbroken(points: Points) -> list[list[tuple[float, float]]]:
    """Split a curve, thinned to about `MOST_POINTS`, where values are not finite."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in _thinned(points):
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thinned(points: Points) -> list[tuple[float, float]]:
    """Keep the smallest and the largest value of each group of consecutive points, so that peaks and gaps remain."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        finite = [point for point in group if math.isfinite(point[1])]
        ends = {choose(finite, key=itemgetter(1)) for choose in (min, max) if finite}
        gaps = [point for point in group if not math.isfinite(point[1])][:1]
        kept += sorted(ends.union(gaps))
    return kept


def _line(places: Sequence[tuple[float, float]], color: str) -> str:
    if len(places) == 1:
        [(x, y)] = places
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>'
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8" stroke-linejoin="round"/>'


def _text(text: str, x: int, y: int, *, anchor: str, size: int = 10) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="currentColor" text-anchor="{anchor}">{escape(text)}</text>'
