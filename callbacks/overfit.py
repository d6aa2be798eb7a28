"""The same few batches again and again: a model that cannot learn these has a bug."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import cycle, islice
from numbers import Real
from typing import TYPE_CHECKING, Any

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.sampling.sharding import batches_of
from runnerkit.types import Batch

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class BatchOverfitCallback(Callback):
    """Let every loader repeat its first batch, as many times as it has batches; the same batch in every epoch.

    Args:
        loader_batches: how many first batches of a loader to repeat instead of one: a number >= 1, or a fraction of the
            loader, 0 < fraction < 1.

    >>> BatchOverfitCallback(train=3, valid=0.1).loader_batches
    {'train': 3, 'valid': 0.1}
    """

    shapes_training = True

    def __init__(self, **loader_batches: float) -> None:
        # After PeriodicLoaderCallback: loaders that rest in an epoch need no batch.
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
            if key not in runner.loaders:
                raise ValueError(
                    f"{type(self).__name__} names loader {key!r}; the loaders are {sorted(runner.loaders)}"
                )
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
            raise TypeError(f"loader {key!r} has no length, so how often its first batch is to be repeated is unknown")
        amount = self.loader_batches.get(key, 1)
        num_batches = int(amount) if amount >= 1 else max(1, int(len(loader) * amount))
        return RepeatedBatches(loader, num_batches=num_batches, length=len(loader))


class RepeatedBatches:
    """The first batches of a loader, fetched once, over and over.

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
