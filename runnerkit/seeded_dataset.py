"""A data set whose every sample draws from generators seeded by its place in the epoch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, get_worker_info

from runnerkit.sampler import Place, set_epoch
from runnerkit.seeding import derive_seed, keep_cpu_rng, seed_generators

_DRAW_NOTHING = (TensorDataset, list, tuple, range)  # these alone: a subclass may


class SeededDataset(Dataset[Any]):
    """Lets sample i of epoch e draw the same numbers on any number of processes and workers, and after any resume.

    Python's, NumPy's and torch's global generators are seeded before each sample. In a worker that is all. In the
    process that trains, the generators are the model's too (dropout), so they are put back after each batch. Spared
    both are torch's TensorDataset, Python's sequences, and classes that say ``draws_nothing = True``.

    Args:
        dataset: map-style. If it fetches whole batches (``__getitems__``), the generators are seeded once a batch.
        seed: with epoch and place it fixes what a sample draws.
        collate_fn: the loader's, which a worker that outlives an epoch tells of the next one.
    """

    def __init__(self, dataset: Any, *, seed: int, collate_fn: Any = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn
        self._epoch = -1

    def __getitem__(self, place: Place) -> Any:
        """Fetch what the data set has at the index of `place`, whatever that is."""
        keeping = self._enter(place.epoch)
        if _draws_nothing(self.dataset):
            return self.dataset[place.index]
        with keeping():
            return self._drawn(place)

    def __getitems__(self, places: list[Place]) -> Any:
        """Fetch the samples at `places`, in order: a list, or what the data set makes of a batch."""
        keeping = self._enter(places[0].epoch) if places else nullcontext
        if not places or _draws_nothing(self.dataset):
            return self._batch(places)
        with keeping():
            if not _fetches_batches(self.dataset):
                return [self._drawn(place) for place in places]
            self._seed(places[0])
            return self._batch(places)

    def _enter(self, epoch: int) -> Callable[[], AbstractContextManager[None]]:
        """Tell a worker's own parts of a new epoch; returns what keeps the generators that are not the data set's."""
        if get_worker_info() is None:
            return keep_cpu_rng
        if epoch != self._epoch:  # a worker that outlives an epoch
            self._epoch = epoch
            set_epoch(epoch, self.dataset, self.collate_fn)
        return nullcontext

    def _batch(self, places: list[Place]) -> Any:
        if _fetches_batches(self.dataset):
            return self.dataset.__getitems__([place.index for place in places])
        return [self.dataset[place.index] for place in places]

    def _drawn(self, place: Place) -> Any:
        self._seed(place)
        return self.dataset[place.index]

    def _seed(self, place: Place) -> None:
        seed_generators(derive_seed(self.seed, "sample", place.epoch, place.position))


def _draws_nothing(dataset: Any) -> bool:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in _DRAW_NOTHING or vars(type(dataset)).get("draws_nothing") is True


def _fetches_batches(dataset: Any) -> bool:
    if isinstance(dataset, Subset):  # torch's own hand on to what they hold
        return _fetches_batches(dataset.dataset)
    if isinstance(dataset, StackDataset):
        held = dataset.datasets
        return any(_fetches_batches(each) for each in (held.values() if isinstance(held, dict) else held))
    return callable(getattr(dataset, "__getitems__", None))
