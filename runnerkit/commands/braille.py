"""Curves drawn with braille characters of 2 x 4 dots each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WEIGHTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # bit of each dot; Unicode block U+2800


def limits(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Return the smallest and largest x and y of the finite points as (2, 2), [[x, y], [x, y]]; NaN without any."""
    points = np.concatenate([*curves, np.empty((0, 2))])
    points = points[np.isfinite(points).all(axis=1)]
    return np.stack([points.min(axis=0), points.max(axis=0)]) if len(points) else np.full((2, 2), np.nan)


def draw_curves(curves: Sequence[np.ndarray], *, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw curves with lines between their points, scaled to `width` x `height` characters.

    Args:
        curves: each (N, 2) float, x and y; a point that is not finite leaves a gap.
    Returns:
        The characters, (height, width) str, and the index of the last curve in each, (height, width) int, -1 for none.

    >>> characters, _ = draw_curves([np.array([[0.0, 0.0], [1.0, 1.0]])], width=4, height=2)
    >>> print(*map("".join, characters), sep="|")
    ⠀⠀⡠⠊|⡠⠊⠀⠀
    """
    smallest, largest = limits(curves)
    scale = np.array([2 * width - 1, 4 * height - 1]) / np.where(largest > smallest, largest - smallest, np.inf)
    dots = np.full((4 * height, 2 * width), -1)
    for number, curve in enumerate(curves):
        kept = np.flatnonzero(np.isfinite(curve).all(axis=1))
        places = (curve[kept] - smallest) * scale
        lines = [places]
        for index in np.flatnonzero(np.diff(kept) == 1):  # no line across a gap
            start, end = places[index : index + 2]
            lines.append(np.linspace(start, end, 2 + int(np.abs(end - start).max())))
        columns, rows = np.concatenate(lines).round().astype(int).T
        dots[-1 - rows, columns] = number
    blocks = dots.reshape(height, 4, width, 2)
    codes = 0x2800 + ((blocks >= 0) * _WEIGHTS[:, None, :]).sum(axis=(1, 3))
    return np.vectorize(chr, otypes=[str])(codes), blocks.max(axis=(1, 3))
