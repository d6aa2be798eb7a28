"""A data set whose every sample draws from generators seeded by its place in the epoch."""

from contextlib import nullcontext
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
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._epoch = -1

    def __getitem__(self, place: Place | list[Place]) -> Any:
        """Fetch the sample at `place`; what the data set makes of a list, if the loader's own sampler gives lists."""
        return self._fetch(place, is_one=True)

    def __getitems__(self, places: list[Place]) -> Any:
        """Fetch the samples at `places`, in order: a list, or what the data set makes of a batch."""
        return self._fetch(places, is_one=_fetches_batches(self.dataset))

    def _fetch(self, places: Place | list[Place], *, is_one: bool) -> Any:
        in_worker = get_worker_info() is not None
        if in_worker:
            self._enter(_first(places).epoch)
        if _draws_nothing(self.dataset):
            return self._plain(places, is_one=is_one)
        with nullcontext() if in_worker else keep_cpu_rng():
            return self._seeded(places, is_one=is_one)

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:  # a worker that outlives an epoch has a data set of its own
            self._epoch = epoch
            set_epoch(epoch, self.dataset)

    def _plain(self, places: Place | list[Place], *, is_one: bool) -> Any:
        if isinstance(places, Place):
            return self.dataset[places.index]
        indices = [place.index for place in places]
        if not is_one:
            return [self.dataset[index] for index in indices]
        return self.dataset.__getitems__(indices) if _fetches_batches(self.dataset) else self.dataset[indices]

    def _seeded(self, places: Place | list[Place], *, is_one: bool) -> Any:
        if isinstance(places, list) and not is_one:
            return [self._seeded(place, is_one=True) for place in places]
        first = _first(places)
        seed_generators(derive_seed(self.seed, "sample", first.epoch, first.position))
        return self._plain(places, is_one=is_one)


def _first(places: Place | list[Place]) -> Place:
    return places if isinstance(places, Place) else places[0]


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
