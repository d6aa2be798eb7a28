"""Text tables with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], *, align: str) -> str:
    """Join cells into lines, columns two spaces apart.

    Args:
        rows: with the same number of cells.
        align: "<" (left) or ">" (right) for each column.

    >>> print(text_table([("loss", "0.5"), ("accuracy", "12")], align="<>"))
    loss      0.5
    accuracy   12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
