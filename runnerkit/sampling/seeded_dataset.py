"""A data set in which each sample draws from generators seeded by its place in the epoch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import (
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from runnerkit.sampling.epochs import set_epoch
from runnerkit.sampling.indexed.sampler import Place, PlacedBatch
from runnerkit.sampling.loader_members import DatasetMembers
from runnerkit.seeding.generators import (
    GENERATORS,
    SEED_STRIDE,
    CPUState,
    derive_seed,
    keep_cpu_rng,
    seed_generators,
)
from runnerkit.support.plain_values import attributes_of

_DRAW_NOTHING = (TensorDataset, list, tuple, range)  # exactly these types: a subclass may draw
_DRAW_NOTHING_EITHER = (None, default_collate, default_convert)


class SeededDataset(Dataset[Any]):
    """Data set in which sample i of epoch e draws the same numbers with any number of processes, workers and resumes.

    Before each sample, the global generators that the data set is known to draw from are seeded: torch's from the
    start if it is used for training; Python's and NumPy's, which take ten times as long, from the first batch that
    draws from them, which is fetched again (once, or once per worker in the first epoch). In the process that trains,
    the model uses these generators too (dropout), so they are restored after each batch. None of this applies to
    torch's TensorDataset, Python's sequences, and classes with ``draws_nothing = True``.

    In a worker, all generators are seeded by the place of the batch's first sample right before a custom
    ``collate_fn`` runs. In the process that trains, it draws from the model's generators.

    Args:
        dataset: map-style. If it fetches whole batches (``__getitems__``), the generators are seeded once per batch.
        training: whether it is used for training, and so probably draws random numbers.
        seed: determines what a sample draws, together with epoch and place.
        collate_fn: the loader's; persistent workers call its ``set_epoch``.
    """

    def __init__(self, dataset: Any, *, training: bool = True, seed: int, collate_fn: Any = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn
        self._epoch, self._is_in_worker = -1, False  # what follows is found out once per epoch and process
        self._draws_nothing, self._fetches_batches = False, False
        self._known = set[str]()  # generators that it is drawn from
        # Per generator, whether it is drawn from. In shared memory, since each epoch starts new workers.
        self._is_drawn_from = torch.tensor([training and name == "torch" for name in GENERATORS]).share_memory_()

    def __getitem__(self, place: Place) -> Any:
        """Fetch the item at the index of `place`, which may have any type."""
        self._enter(place.epoch)
        if self._draws_nothing:
            item = self.dataset[place.index]
        else:
            positions = range(place.position, place.position + 1)
            [item] = self._drawn(PlacedBatch(place.epoch, positions, [place.index]))
        if self._is_in_worker:
            seed_collate(self.collate_fn, seed=self.seed, epoch=place.epoch, position=place.position)
        return item

    def __getitems__(self, batch: PlacedBatch) -> Any:
        """Fetch the samples of `batch`, in order: a list, or the data set's own kind of batch."""
        self._enter(batch.epoch)
        if not batch.indices:
            return self._batch([])
        fetched = self._fetched(batch)
        if self._is_in_worker:
            seed_collate(self.collate_fn, seed=self.seed, epoch=batch.epoch, position=batch.positions[0])
        return fetched

    def _fetched(self, batch: PlacedBatch) -> Any:
        if self._draws_nothing:
            return self._batch(batch.indices)
        if not self._fetches_batches:
            return self._drawn(batch)
        with nullcontext() if self._is_in_worker else keep_cpu_rng():
            seed_generators(*self._seeds(batch.part(0, 1)))
            return self._batch(batch.indices)

    def _enter(self, epoch: int) -> None:
        is_in_worker = get_worker_info() is not None
        if epoch == self._epoch and is_in_worker is self._is_in_worker:
            return
        self._epoch, self._is_in_worker = epoch, is_in_worker
        self._known = {name for name, known in zip(GENERATORS, self._is_drawn_from.tolist(), strict=True) if known}
        if is_in_worker:  # a persistent one
            set_epoch(epoch, self.dataset, self.collate_fn)
        self._draws_nothing, self._fetches_batches = draws_nothing(self.dataset), _fetches_batches(self.dataset)

    def _batch(self, indices: list[Any]) -> Any:
        if self._fetches_batches:
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]

    def _drawn(self, batch: PlacedBatch) -> list[Any]:
        before, drawn_from = CPUState(), set(GENERATORS)  # a sample that fails may have drawn from any
        known = self._known
        try:
            items = self._seeded(batch, known)
            while moved := before.moved(apart_from=known):
                known |= moved
                self._is_drawn_from |= torch.tensor([name in known for name in GENERATORS])
                items = self._seeded(batch, known)
            drawn_from = known
        finally:
            if not self._is_in_worker:
                before.restore(drawn_from)
        return items

    def _seeded(self, batch: PlacedBatch, drawn_from: set[str]) -> list[Any]:
        dataset = self.dataset
        if not drawn_from:
            return [dataset[index] for index in batch.indices]
        seeders = [GENERATORS[name] for name in drawn_from]
        # Each call counts here: with a single generator, call its function directly.
        seed = seeders[0] if len(seeders) == 1 else lambda number: [seed_one(number) for seed_one in seeders]
        # zip makes map seed right after it takes an index, so right before that sample is fetched.
        return [dataset[index] for index, _ in zip(batch.indices, map(seed, self._seeds(batch)), strict=True)]

    def _seeds(self, batch: PlacedBatch) -> range:
        first, positions = derive_seed(self.seed, "sample", batch.epoch), batch.positions
        start, stop = first + SEED_STRIDE * positions.start, first + SEED_STRIDE * positions.stop
        return range(start, stop, SEED_STRIDE * positions.step)


def is_seeded(dataset: Any, collate_fn: Any) -> bool:
    """Return whether seeds, or the epoch in a worker, can affect fetching or collating."""
    fetches_alike = _innermost_type(dataset) in _DRAW_NOTHING or (
        draws_nothing(dataset) and not isinstance(dataset, Subset) and DatasetMembers(dataset).set_epoch is None
    )
    return not fetches_alike or collate_fn not in _DRAW_NOTHING_EITHER


def seed_collate(collate_fn: Any, *, seed: int, epoch: int, position: int) -> None:
    """Seed all generators of a worker for a custom ``collate_fn``, by the position in the epoch of its batch."""
    if _in_worker() and collate_fn not in _DRAW_NOTHING_EITHER:
        # Not the seed of the first sample, whose numbers it would draw again.
        seed_generators(derive_seed(seed, "collate", epoch) + SEED_STRIDE * position)


def _in_worker() -> bool:
    return get_worker_info() is not None


def draws_nothing(dataset: Any) -> bool:
    """Return whether a data set is of a kind that cannot draw, or it or its own class declares it."""
    kind = _innermost_type(dataset)
    declared = vars(kind).get("draws_nothing")  # not what a base class declares
    return kind in _DRAW_NOTHING or attributes_of(dataset).get("draws_nothing", declared) is True


def _innermost_type(dataset: Any) -> type:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset)


def _fetches_batches(dataset: Any) -> bool:
    if isinstance(dataset, Subset):  # torch's own delegate to their parts
        return _fetches_batches(dataset.dataset)
    if isinstance(dataset, StackDataset):
        held = dataset.datasets
        return any(_fetches_batches(each) for each in (held.values() if isinstance(held, dict) else held))
    return callable(DatasetMembers(dataset).getitems)
