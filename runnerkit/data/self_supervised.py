"""Two random views of each sample, for contrastive training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

__all__ = ["SelfSupervisedDatasetWrapper"]


class SelfSupervisedDatasetWrapper(Dataset[tuple[Any, ...]]):
    """Samples of another data set as (sample, left view, right view, target).

    Args:
        dataset: of (sample, target), or of samples.
        transforms: called twice to make both views.
        transform_left, transform_right: instead of `transforms`, one for each view.
        transform_original: applied to the sample itself.
        is_target: whether `dataset` has targets; otherwise the tuples end with the right view.
    Raises:
        ValueError: neither `transforms` nor both of the others are given.

    >>> SelfSupervisedDatasetWrapper([("a", 0), ("b", 1)], transforms=str.upper)[1]
    ('b', 'B', 'B', 1)
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Callable[[Any], Any] | None = None,
        transform_left: Callable[[Any], Any] | None = None,
        transform_right: Callable[[Any], Any] | None = None,
        transform_original: Callable[[Any], Any] | None = None,
        is_target: bool = True,
    ) -> None:
        left, right = transform_left or transforms, transform_right or transforms
        if left is None or right is None:
            raise ValueError("SelfSupervisedDatasetWrapper: pass transforms, or transform_left and transform_right")
        self.dataset, self.is_target = dataset, is_target
        self.transform_left, self.transform_right, self.transform_original = left, right, transform_original

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        sample, *targets = self.dataset[index] if self.is_target else (self.dataset[index],)
        original = sample if self.transform_original is None else self.transform_original(sample)
        return original, self.transform_left(sample), self.transform_right(sample), *targets
