"""Curves as braille characters, of which each holds 2 x 4 dots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WEIGHTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # of the dots; Unicode, from U+2800 on


def limits(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Find the finite points' smallest and largest x and y: (2, 2), [[x, y], [x, y]]; all NaN if there is none."""
    points = np.concatenate([*curves, np.empty((0, 2))])
    points = points[np.isfinite(points).all(axis=1)]
    return np.stack([points.min(axis=0), points.max(axis=0)]) if len(points) else np.full((2, 2), np.nan)


def draw_curves(curves: Sequence[np.ndarray], *, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw curves that fill the given number of characters, with lines between their points.

    Args:
        curves: each (N, 2) float, x and y; a point that is not finite leaves a gap.
    Returns:
        (height, width) str, the characters; (height, width) int, the last curve in each, -1 where there is none.

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
        for index in np.flatnonzero(np.diff(kept) == 1):  # none across a gap
            start, end = places[index : index + 2]
            lines.append(np.linspace(start, end, 2 + int(np.abs(end - start).max())))
        columns, rows = np.concatenate(lines).round().astype(int).T
        dots[-1 - rows, columns] = number
    blocks = dots.reshape(height, 4, width, 2)
    codes = 0x2800 + ((blocks >= 0) * _WEIGHTS[:, None, :]).sum(axis=(1, 3))
    return np.vectorize(chr, otypes=[str])(codes), blocks.max(axis=(1, 3))
