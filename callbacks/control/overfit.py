"""Overfitting a few batches, to find bugs: a correct model can learn them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import cycle, islice
from numbers import Real
from typing import TYPE_CHECKING, Any

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.loop.checks import check_loader_key
from runnerkit.sampling.sharding import batches_of
from runnerkit.types import Batch

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["BatchOverfitCallback"]


class BatchOverfitCallback(Callback):
    """Replace every batch of each loader by its first one; the number of batches stays the same.

    The batch is fetched once and stays the same in every epoch.

    Args:
        loader_batches: by loader key, how many of its first batches to repeat instead of one: a number >= 1, or a
            fraction of the loader, 0 < fraction < 1.

    >>> BatchOverfitCallback(train=3, valid=0.1).loader_batches
    {'train': 3, 'valid': 0.1}
    """

    shapes_training = True

    def __init__(self, **loader_batches: float) -> None:
        # After PeriodicLoaderCallback: a loader that does not run in an epoch needs no batch.
        super().__init__(order=CallbackOrder.Internal + 1)
        for key, amount in loader_batches.items():
            if not isinstance(amount, Real) or not amount > 0 or (amount > 1 and amount % 1):
                raise (ValueError if isinstance(amount, Real) else TypeError)(
                    f"BatchOverfitCallback: {key} must be a number of batches >= 1 or a fraction of the loader, got "
                    f"{amount!r}"
                )
        self.loader_batches = loader_batches
        self._repeated: dict[str, RepeatedBatches] = {}
        self._originals: dict[str, Any] = {}

    def on_stage_start(self, runner: IRunner) -> None:
        for key in self.loader_batches:
            check_loader_key(key, runner.loaders, reader=type(self).__name__)
        self._repeated, self._originals = {}, {}

    def on_epoch_start(self, runner: IRunner) -> None:
        for key, loader in runner.loaders.items():
            if key not in self._repeated:
                self._repeated[key] = self._first_batches(key, loader)
            self._originals[key] = loader
        runner.loaders = {key: self._repeated[key] for key in runner.loaders}

    def on_epoch_end(self, runner: IRunner) -> None:
        runner.loaders = {key: self._originals.get(key, loader) for key, loader in runner.loaders.items()}
        self._originals = {}

    def on_stage_end(self, runner: IRunner) -> None:
        self._repeated = {}

    def _first_batches(self, key: str, loader: Any) -> RepeatedBatches:
        if not isinstance(loader, Sized):
            raise TypeError(f"BatchOverfitCallback: loader {key!r} must have a len(), the number of batches to make")
        amount = self.loader_batches.get(key, 1)
        num_batches = int(amount) if amount >= 1 else max(1, int(len(loader) * amount))
        return RepeatedBatches(loader, num_batches=num_batches, length=len(loader))


class RepeatedBatches:
    """The first batches of a loader, fetched once and repeated.

    >>> list(RepeatedBatches("abcde", num_batches=2, length=5))
    ['a', 'b', 'a', 'b', 'a']
    """

    def __init__(self, loader: Any, *, num_batches: int, length: int) -> None:
        self._batches = list(islice(batches_of(loader), num_batches))
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        return islice(cycle(self._batches), self._length)
