"""Confusion matrix, as counts and as an image."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runnerkit.callbacks.metrics.parts.class_indices import (
    check_all_classes,
    class_indices,
    count_indices,
    numbered_classes,
)
from runnerkit.callbacks.metrics.parts.loader_sums import LoaderSums, LoaderSumsCallback, Sums
from runnerkit.logger import takes
from runnerkit.metrics.reduction import Share
from runnerkit.support.arguments import check_integers, check_mappings, check_names, check_strings

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["ConfusionMatrixCallback"]

logger = logging.getLogger(__name__)


class ConfusionMatrixCallback(LoaderSumsCallback):
    """Count the predicted classes of each true class; log ``confusion_matrix/TRUE_as_PREDICTED``.

    Loggers that accept images, such as TensorBoard's, also get an image if Matplotlib is installed.

    Args:
        input_key: logits (N, C, ...) in ``runner.batch``, or class indices (N, ...).
        target_key: class indices (N, ...) int64 in ``runner.batch``.
        prefix: name to log, by default ``confusion_matrix``.
        class_names: names of the C classes; by default ``class_00`` and so on.
        num_classes: C; pass this or `class_names`.
        normalize: draw each row as fractions of its class.
        plot_params: arguments of Matplotlib's ``Figure``.
        log_counts: log the C * C counts as numbers.

    >>> ConfusionMatrixCallback("logits", "targets", class_names=["cat", "dog"]).provides[1]
    'confusion_matrix/cat_as_dog'
    """

    def __init__(
        self,
        input_key: str,
        target_key: str,
        prefix: str | None = None,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        normalize: bool = False,
        plot_params: Mapping[str, Any] | None = None,
        *,
        log_counts: bool = True,
    ) -> None:
        check_names(self, or_none=True, class_names=class_names)
        check_integers(self, or_none=True, num_classes=num_classes)
        check_strings(self, or_none=True, prefix=prefix)
        check_mappings(self, plot_params=plot_params)
        if class_names is None and num_classes is None:
            raise ValueError("ConfusionMatrixCallback: pass class_names= or num_classes=")
        if class_names is not None and num_classes not in (None, len(class_names)):
            raise ValueError(
                f"ConfusionMatrixCallback: class_names has {len(class_names)} entries for num_classes={num_classes}"
            )
        super().__init__(input_key=input_key, target_key=target_key, log_on_batch=False, prefix=None, suffix=None)
        self.name = prefix or "confusion_matrix"
        self.class_names = list(class_names) if class_names is not None else numbered_classes(num_classes or 0)
        self.normalize, self.plot_params, self.log_counts = normalize, dict(plot_params or {}), log_counts
        names = self.class_names if log_counts else []
        self.provides = tuple(f"{self.name}/{true}_as_{predicted}" for true in names for predicted in names)

    def count(self, *inputs: Tensor) -> Sums:
        predicted, targets, size = class_indices(*inputs, num_classes=len(self.class_names))
        size += 1  # the last row and column count invalid indices
        pairs = count_indices(targets * size + predicted, num_classes=size * size)
        return {"counts": pairs.reshape(size, size)}

    def check_total(self, sums: Sums, *, loader_key: str) -> None:
        counts = sums["counts"]
        num_outside = {"targets": counts[-1].sum(), "outputs": counts[:, -1].sum()}
        check_all_classes(num_outside, num_classes=len(counts) - 1, loader_key=loader_key)

    def values(self, sums: Sums) -> Sums:
        counts = sums["counts"][:-1, :-1].reshape(-1)
        return dict(zip(self.provides, counts.unbind(), strict=True)) if self.log_counts else {}

    def finish(self, runner: IRunner, state: LoaderSums, total: Share) -> None:
        super().finish(runner, state, total)
        image = self.draw(total.sums["counts"][:-1, :-1]) if takes(runner.loggers, "log_image") else None
        if image is not None:
            runner.log_image(self.name, image)

    def draw(self, counts: Tensor) -> np.ndarray | None:
        """Draw (C, C) counts, true classes in rows; (H, W, 3) uint8, or None without Matplotlib."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            logger.warning("no image of %r without Matplotlib: pip install runnerkit[metrics]", self.name)
            return None
        numbers = counts.cpu().double()
        if self.normalize:
            numbers = numbers / numbers.sum(dim=1, keepdim=True).clamp(min=1)
        size = len(self.class_names)
        figure = Figure(**{"figsize": (2 + 0.6 * size, 2 + 0.6 * size), "layout": "constrained", **self.plot_params})
        canvas = FigureCanvasAgg(figure)  # unlike pyplot, needs no global figures and no display
        axes = figure.add_subplot(xlabel="predicted", ylabel="true", title=self.name)
        axes.imshow(numbers.numpy(), cmap="Blues")
        axes.set_xticks(range(size), self.class_names, rotation=90)
        axes.set_yticks(range(size), self.class_names)
        for row, column in torch.cartesian_prod(torch.arange(size), torch.arange(size)).tolist():
            number = float(numbers[row, column])
            color = "white" if number > float(numbers.max()) / 2 else "black"
            text = f"{number:.2f}" if self.normalize else f"{number:.0f}"
            axes.text(column, row, text, ha="center", va="center", color=color)
        canvas.draw()  # type: ignore[no-untyped-call]  # Matplotlib's
        return np.array(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]  # Matplotlib's
