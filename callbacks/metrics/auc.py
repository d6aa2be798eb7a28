"""Area under the ROC curve, per class and averaged over classes."""

from __future__ import annotations

import torch
from torch import Tensor

from runnerkit.callbacks.metrics.parts.class_indices import check_classes, numbered_classes
from runnerkit.callbacks.metrics.parts.loader_samples import LoaderSamplesCallback
from runnerkit.callbacks.metrics.parts.loader_sums import Sums, ratio

__all__ = ["AUCCallback"]


class AUCCallback(LoaderSamplesCallback):
    """Log ``auc`` and ``auc/_macro``, both the mean over classes, ``auc/_micro`` and ``auc/_weighted``.

    Each class is compared with all others (one-vs-rest). A class without both positive and negative samples is NaN, and
    the means skip it. The weight of a class is its number of samples. No activation is needed: only the order matters.

    Args:
        input_key: scores (N, C) in ``runner.batch``; (N,) or (N, 1) are scores of the second of two classes.
        target_key: 0/1 targets of as many elements, or class indices (N,) for scores (N, C) of C > 1 classes.
        compute_per_class_metrics: also log ``auc/class_00`` and so on.
        prefix, suffix: added to the names.

    >>> AUCCallback("scores", "targets").provides
    ('auc', 'auc/_micro', 'auc/_macro', 'auc/_weighted')
    """

    def __init__(
        self,
        input_key: str,
        target_key: str,
        *,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__(input_key=input_key, target_key=target_key, prefix=prefix, suffix=suffix)
        self.compute_per_class_metrics = compute_per_class_metrics
        names = ("", "/_micro", "/_macro", "/_weighted")
        self.provides = tuple(f"{self.prefix}auc{self.suffix}{each}" for each in names)

    def check(self, *inputs: Tensor) -> None:
        scores, targets = inputs
        if scores.ndim not in (1, 2) or targets.shape not in (scores.shape, scores.shape[:1]):
            raise ValueError(
                f"expected scores (N, C) and targets (N, C) or (N,), or both (N,), got {tuple(scores.shape)} and "
                f"{tuple(targets.shape)}"
            )

    def values(self, *columns: Tensor) -> Sums:
        scores, targets = columns
        if scores.ndim == 2 and scores.shape[1] > 1 and targets.ndim == 1:
            classes = torch.arange(scores.shape[1], device=targets.device)
            check_classes(targets.long(), num_classes=len(classes))
            targets = targets.unsqueeze(1) == classes
        else:
            targets = targets > 0.5
        scores, targets = scores.reshape(len(scores), -1), targets.reshape(len(targets), -1)
        of_classes = torch.stack([roc_auc(*pair) for pair in zip(scores.unbind(1), targets.unbind(1), strict=True)])
        macro, support = of_classes.nanmean(), targets.sum(dim=0) * ~of_classes.isnan()
        values = {
            "auc": macro,
            "auc/_micro": roc_auc(scores.reshape(-1), targets.reshape(-1)),
            "auc/_macro": macro,
            "auc/_weighted": ratio((of_classes.nan_to_num() * support).sum(), support.sum(), zero_division=torch.nan),
        }
        if self.compute_per_class_metrics:
            names = numbered_classes(len(of_classes))
            values |= {f"auc/{name}": each for name, each in zip(names, of_classes, strict=True)}
        return values


def roc_auc(scores: Tensor, targets: Tensor) -> Tensor:
    """Compute the probability that a positive sample scores above a negative one; a tie counts one half.

    This is the Mann-Whitney U statistic divided by the number of pairs; only the last division is rounded.

    Args:
        scores: (N,).
        targets: (N,) bool.
    Returns:
        () in [0, 1], NaN if there are no pairs or a score is NaN; float64 if the device supports it.

    >>> roc_auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
    tensor(0.7500, dtype=torch.float64)
    """
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    first = count.cumsum(0) - count
    twice_rank = (2 * first + count + 1)[place]  # tied scores have their mean rank; twice that is an integer
    num_positive = targets.sum()
    num_pairs = num_positive * (len(targets) - num_positive)
    twice_u = (twice_rank * targets).sum() - num_positive * (num_positive + 1)
    area = ratio(twice_u, 2 * num_pairs, zero_division=torch.nan)
    return torch.where(scores.isnan().any(), torch.nan, area)
