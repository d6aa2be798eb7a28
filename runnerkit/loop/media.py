"""Conversion of what users log to small host arrays and lists for loggers; synchronizes with the device."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runnerkit.logger import Cell, Histogram, PRCurve
from runnerkit.support.torch_internals import local
from runnerkit.types import widest_float

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_BINS = 64
_NUM_THRESHOLDS = 127  # as TensorBoard's own PR curves have


def image_of(image: Tensor | np.ndarray) -> np.ndarray:
    """Convert an image to a uint8 array of shape (H, W), (H, W, 3) or (H, W, 4).

    Args:
        image: tensor (C, H, W) or (H, W), or array (H, W, C) or (H, W), C in {1, 3, 4}. Integers in [0, 255], floats in
            [0, 1], or bools; other values are clipped, and NaN becomes 0.
    Raises:
        TypeError, ValueError: another type or shape.

    >>> image_of(torch.tensor([[0.0, 0.5, 2.0]])).tolist()
    [[0, 128, 255]]
    """
    if isinstance(image, Tensor):
        pixels = image.detach().movedim(0, -1) if image.ndim == 3 else image.detach()
        is_float, expected = image.is_floating_point(), "a tensor of shape (C, H, W) or (H, W)"
    elif isinstance(image, np.ndarray):
        is_float, expected = np.issubdtype(image.dtype, np.floating), "an array of shape (H, W, C) or (H, W)"
        pixels = torch.from_numpy(np.ascontiguousarray(image))
    else:
        raise TypeError(f"an image is a tensor or a NumPy array, got {type(image).__name__}")
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] not in (1, 3, 4)) or not pixels.numel():
        raise ValueError(
            f"an image is {expected} with C = 1, 3 or 4, got {tuple(image.shape)}; combine several, "
            "for example with torchvision.utils.make_grid"
        )
    if pixels.dtype == torch.bool or is_float:
        pixels = (pixels.float() * 255).nan_to_num(nan=0.0).round()  # NaN as uint8 depends on the device
    elif pixels.dtype != torch.uint8:
        pixels = pixels.long()
    levels: np.ndarray = pixels.clamp(0, 255).to(torch.uint8).cpu().numpy()  # a copy: the caller's array may change
    return levels[..., 0] if levels.ndim == 3 and levels.shape[-1] == 1 else levels


def image_of_figure(figure: Figure) -> np.ndarray:
    """Render a Matplotlib figure as (H, W, 3) uint8; the figure is not changed or closed.

    Raises:
        TypeError: it is not a figure.
    """
    if not hasattr(figure, "savefig"):
        raise TypeError(f"a figure must be a Matplotlib Figure, got {type(figure).__name__}")
    from PIL import Image  # Matplotlib needs it too

    file = io.BytesIO()
    figure.savefig(file, format="png")
    return np.asarray(Image.open(file).convert("RGB"))


def histogram_of(values: Tensor | np.ndarray) -> Histogram | None:
    """Count `values`, of any shape, in 64 bins from the smallest to the largest; None if none of them is finite.

    NaN and infinities are left out. For a DTensor (FSDP), only this process's shard is counted.

    >>> histogram_of(torch.tensor([0.0, 1.0, 1.0])).counts[[0, -1]].tolist()
    [1, 2]
    """
    flat = _flat(values, "values")
    flat = flat.to(widest_float(flat.device))
    flat = flat[flat.isfinite()]
    if not flat.numel():
        return None
    low, high = torch.stack([flat.min(), flat.max()]).tolist()
    if low == high:
        margin = max(0.5, abs(low) * 1e-3)  # wide enough to differ from `low`
        low, high = low - margin, high + margin
    index = ((flat - low) * (_NUM_BINS / (high - low))).long().clamp(0, _NUM_BINS - 1)
    counts = torch.bincount(index, minlength=_NUM_BINS)
    return Histogram(counts=counts.cpu().numpy(), edges=np.linspace(low, high, _NUM_BINS + 1))


def pr_curve_of(scores: Tensor | np.ndarray, targets: Tensor | np.ndarray) -> PRCurve:
    """Count true and false positives and negatives at 127 thresholds.

    Args:
        scores: (N,) or any shape, probabilities in [0, 1].
        targets: of the same shape, bool or 0 and 1.
    Raises:
        ValueError: other values, or shapes that differ.
    """
    if tuple(scores.shape) != tuple(targets.shape):
        raise ValueError(
            f"scores and targets must have the same shape, got {tuple(scores.shape)} and {tuple(targets.shape)}"
        )
    given, truth = _flat(scores, "scores"), _flat(targets, "targets")
    device = given.device
    given, truth = given.to(widest_float(device)), truth.to(device)
    is_positive = truth == 1
    if not bool((is_positive | (truth == 0)).all()):
        raise ValueError("targets of a PR curve are bools, or 0 and 1; with several classes, draw one against the rest")
    if not bool(((given >= 0) & (given <= 1)).all()):
        raise ValueError("scores of a PR curve are probabilities in [0, 1]: pass logits.sigmoid()")
    thresholds = torch.linspace(0, 1, _NUM_THRESHOLDS, dtype=given.dtype, device=device)
    reached = torch.bucketize(given, thresholds, right=True) - 1  # the last threshold that a score reaches
    true, false = (
        torch.bincount(reached[which], minlength=_NUM_THRESHOLDS).flip(0).cumsum(0).flip(0).cpu().numpy()
        for which in (is_positive, ~is_positive)
    )
    return PRCurve(
        thresholds=thresholds.cpu().double().numpy(),
        true_positives=true,
        false_positives=false,
        true_negatives=false[0] - false,
        false_negatives=true[0] - true,
        precision=true / np.maximum(true + false, 1),
        recall=true / np.maximum(true[0], 1),
    )


def table_of(table: Mapping[str, Any]) -> dict[str, list[Cell]]:
    """Copy a table of columns, each a sequence, an array or a tensor (N,) of strings or numbers, to lists.

    Raises:
        TypeError, ValueError: there are no columns, their lengths differ, or a cell is something else.

    >>> table_of({"class": ["cat", "dog"], "recall": torch.tensor([0.5, 1.0])})
    {'class': ['cat', 'dog'], 'recall': [0.5, 1.0]}
    """
    if not hasattr(table, "items") or not len(table):
        raise TypeError(f"a table is a mapping from names of columns to their cells, got {table!r}")
    plain = {str(name): each.tolist() if hasattr(each, "tolist") else each for name, each in table.items()}
    for name, column in plain.items():
        if isinstance(column, str) or not isinstance(column, Iterable):
            raise TypeError(f"a column of a table is a sequence of cells, got {column!r} for {name!r}")
    lists = {name: list(column) for name, column in plain.items()}
    lengths = {name: len(each) for name, each in lists.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of a table must have the same length, got {lengths}")
    for name, cells in lists.items():
        if wrong := [each for each in cells if not isinstance(each, str | int | float)]:
            raise TypeError(f"cells of a table are strings or numbers, got {wrong[0]!r} in column {name!r}")
    return lists


def text_of(text: str) -> str:
    """Return `text`; raise TypeError unless it is a str."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {type(text).__name__}")
    return text


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path; raise FileNotFoundError if nothing is there."""
    found = Path(path).absolute()
    if not found.exists():
        raise FileNotFoundError(f"there is no file or folder {found} to log")
    return found


def _flat(values: Any, name: str) -> Tensor:
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.ascontiguousarray(values))
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a tensor or a NumPy array, got {type(values).__name__}")
    # A DTensor's operations may wait for all ranks, and only those with loggers are here.
    own: Tensor = local(values)
    return own.detach().reshape(-1)
