"""A loader whose epochs have a given number of batches, whatever the length of its data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Self

from runnerkit.data.loader_wrapper import LoaderWrapper
from runnerkit.sampling.orders import Order
from runnerkit.sampling.sharding import Uneven, batches_of, count_batches, share_of, start_epoch
from runnerkit.sampling.share import LoaderShare, PassPosition
from runnerkit.seeding.generators import keep_cpu_rng
from runnerkit.support.arguments import check_integers
from runnerkit.types import Batch

__all__ = ["EpochStepsLoaderWrapper"]

logger = logging.getLogger(__name__)

_END = object()


class EpochStepsLoaderWrapper(LoaderWrapper):
    """A loader that is cut into epochs of equal length: a stream without end, or data that take too long for an epoch.

    Each epoch continues where the previous one ended; data that end start again, in another order. The job reads each
    sample of a stream of shards once (docs/streams.md). A run resumes at the same place.

    Args:
        loader: any loader; wrap it last, outside of other wrappers.
        epoch_steps: batches per process in an epoch.
        restart: start each epoch at the beginning, in the order of that epoch, instead of continuing; it ends with the
            data, if these are shorter. Lanes of a stream of shards that end start again.

    >>> loader = EpochStepsLoaderWrapper("abcde", epoch_steps=3)
    >>> [list(loader) for epoch in (1, 2, 3)]
    [['a', 'b', 'c'], ['d', 'e', 'a'], ['b', 'c', 'd']]
    """

    def __init__(self, loader: Any, epoch_steps: int, *, restart: bool = False) -> None:
        super().__init__(loader)
        check_integers(self, epoch_steps=epoch_steps)
        self.epoch_steps = int(epoch_steps)
        self.restart = restart
        self._continuing = _Continued(loader, self.epoch_steps)

    @property
    def _continued(self) -> _Continued:
        if self._continuing.loader is not self.origin:  # this is a copy around another loader
            self._continuing = _Continued(self.origin, self.epoch_steps)
        return self._continuing

    def __iter__(self) -> Iterator[Batch]:
        if self.restart:
            return islice(batches_of(self.origin), self._num_left())
        return self._continued.epoch()

    def __len__(self) -> int:
        # A pass that starts again each time may be shorter.
        return min(self._num_left(), super().__len__()) if self.restart else self._num_left()

    @property
    def _share(self) -> LoaderShare:
        inner = share_of(self.origin)
        return self._continued if inner.has_position and not self.restart else inner

    def shard(
        self, *, key: str, training: bool, rank: int, world_size: int, seed: int, uneven: Uneven = "drop",
        endless: bool = True,
    ) -> Self:  # fmt: skip
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": seed}
        wrapper = super().shard(key=key, training=training, endless=endless and training, **place)
        if not self.restart and not share_of(wrapper.origin).has_position and rank == 0:
            logger.warning(
                "loader %r does not have a position: a resumed run would read its data from the start again", key
            )
        return wrapper

    def close(self) -> None:
        """Release the iterator that outlives an epoch, and with it the workers."""
        self._continued.close()

    def _num_left(self) -> int:
        """Count the batches left in this epoch, without the batches that ran before an interruption."""
        if not self.restart:
            return self.epoch_steps - self._continued.num_before
        share = share_of(self.origin)
        return max(0, self.epoch_steps - share.num_consumed // share.stride)


class _Continued(LoaderShare):
    """The pass over a loader that continues from epoch to epoch, and its position.

    Attributes:
        share: the loader's, of the current pass.
        num_before: batches of this epoch that ran before an interruption.
    """

    continues = True

    def __init__(self, loader: Any, epoch_steps: int) -> None:
        self.loader, self.epoch_steps = loader, epoch_steps
        self.share = share = share_of(loader)
        self.batch_size, self.stride, self.head = share.batch_size, share.stride, share.head
        self.knows_sizes = share.knows_sizes
        self.num_before = 0
        self._num_yielded = 0  # in this epoch, since then
        self._epoch = 1
        self._pass = 0  # in another stage, the first one has another number
        self._num_in_pass = 0  # batches of this pass before this epoch, since its iterator was made
        self._num_needed = 0  # in this epoch and later ones; 0 if unknown
        self._batches: Iterator[Batch] | None = None

    @property
    def is_at_start(self) -> bool:
        return self._num_in_pass + self._num_yielded == 0 and self.share.is_at_start

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch where the one before ended."""
        self.num_before = self.num_consumed = self._num_needed = 0
        self._epoch = epoch

    def position_after(self, num_batches: int) -> PassPosition:
        """Return the position in the pass; `num_batches` must be those that were yielded in this epoch."""
        within = self.share.position_after(self._num_in_pass + num_batches)
        return {
            "pass": self._pass,
            "within": within,
            "fingerprint": self.share.fingerprint(within),
            "num_done": self.num_before + num_batches,
        }

    def described(self) -> Order | None:
        return self.share.described()

    def sizes_of(self, number: int) -> Sequence[int | None] | None:
        return self.share.sizes_of(self._num_in_pass + number)

    @property
    def full_size(self) -> int | None:
        return self.share.full_size

    def need(self, num_batches: int) -> None:
        self._num_needed = num_batches

    def end_after(self, num_samples: int) -> None:
        """List no more of a long order than the stage needs; batches are not cut."""
        num_batches = math.ceil(num_samples / self.stride)
        self._num_needed = min(self._num_needed or num_batches, num_batches)

    def first_uneven(self) -> int:
        return max(0, self.share.first_uneven() - self._num_in_pass - self._num_yielded)

    def steps_for(self, num_samples: int, length: int | None) -> int | None:
        return self.share.steps_for(num_samples, count_batches(self.loader))

    @property
    def position(self) -> PassPosition:
        return {**self.position_after(self._num_yielded), "num_done": 0}

    def joined(self, position: PassPosition, gather: Callable[[Any], list[Any]]) -> PassPosition:
        return {**position, "within": self.share.joined(position["within"], gather)}

    def skip(self, position: PassPosition) -> None:
        """Continue at a position.

        Raises:
            ValueError: the run was saved without `epoch_steps`.
        """
        if not isinstance(position, dict) or "pass" not in position:
            raise ValueError(
                "the run was interrupted in an epoch without epoch_steps and cannot resume within it with "
                f"epoch_steps={self.epoch_steps}: leave it out, or resume from an epoch's end"
            )
        self.close()
        self._pass = position["pass"]
        if self._pass > 0:
            start_epoch(self.loader, self._pass)
            self.share.skip(position["within"])
            self.share.expect(position.get("fingerprint"))  # absent before 0.2
        self.num_before = min(position["num_done"], self.epoch_steps)
        self.num_consumed = self.num_before * self.stride
        self._num_in_pass = self._num_yielded = 0

    def epoch(self) -> Iterator[Batch]:
        """Yield the batches of an epoch; starts the pass now, if none is under way."""
        self._num_in_pass += self._num_yielded
        self._num_yielded = 0
        if self._batches is None:
            if self._pass == 0:
                self._start_pass()
            else:  # a resumed pass: without the interruption, no seed for workers would have been drawn here
                with keep_cpu_rng():
                    self._batches = self._batches_of_pass()
        return self._rest_of_epoch()

    def close(self) -> None:
        self._batches = None

    def _rest_of_epoch(self) -> Iterator[Batch]:
        while self.num_before + self._num_yielded < self.epoch_steps:
            assert self._batches is not None
            batch = next(self._batches, _END)
            if batch is _END:
                self._start_pass()
                batch = next(self._batches, _END)
                if batch is _END:
                    raise ValueError(f"the loader gave no batch in pass {self._pass}")
            self._num_yielded += 1
            yield batch

    def _start_pass(self) -> None:
        self._pass = self._pass + 1 if self._pass else self._epoch
        self._num_in_pass = -self._num_yielded
        start_epoch(self.loader, self._pass)
        self._batches = self._batches_of_pass()

    def _batches_of_pass(self) -> Iterator[Batch]:
        if self._num_needed:
            # Passes that ended within this epoch may have had a short last batch each.
            self.share.need(max(0, self._num_needed - self._num_yielded) + self.epoch_steps)
        return batches_of(self.loader)
