"""The contract of a process's share of a loader, and the share of a loader that is not divided."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from runnerkit.sampling.loader_members import SamplerMembers
from runnerkit.sampling.orders import EndedOrder, Order

if TYPE_CHECKING:
    from runnerkit.sampling.streams.heads import StreamHead

# A place in a pass, in the plain values that a checkpoint holds: the samples, or whole batches, that all processes took
# of an order; these and the step size, of files in lanes; or by name, the place of each lane of a stream, or the place
# within a pass that continues from epoch to epoch.
PassPosition: TypeAlias = Any


class LoaderShare(ABC):
    """The batches of a loader that are one process's, and the position in a pass over them.

    A step is one batch of each process. Members that a share does not override are those of a loader of which only the
    position is known.

    Attributes:
        batch_size: samples per batch and process; None if whole batches are distributed, or if it is unknown.
        stride: samples, or whole batches, of all processes in a step.
        num_consumed: samples, or whole batches, of this epoch that all processes took before an interruption.
        drop_last: whether a short last step is left out, which may be set before a pass; None if that is not up to the
            share.
        order: the order of the current pass for all processes, empty until the loader asks for it; None if none exists.
        shares_whole_batches: whether processes take turns by batches, not by samples.
        has_position: whether :meth:`position_after` and :meth:`skip` work.
        knows_sizes: whether :meth:`sizes_of` and :meth:`first_uneven` tell the sizes of training steps.
        yields_its_length: whether its loader, if it is not a DataLoader, surely yields as many batches as its length.
        endless: whether a pass never ends, and all batches are full.
        continues: whether a pass continues from epoch to epoch.
        needs_new_workers: whether persistent workers, if there are any, do not know the place where the pass begins.
        head: fingerprints of a stream's first samples, if each of several processes or workers reads the whole stream.
    """

    batch_size: int | None = None
    stride: int = 1
    num_consumed: int = 0
    drop_last: bool | None = None
    order: Sequence[Any] | None = None
    shares_whole_batches = False
    has_position = True
    knows_sizes = False
    yields_its_length = False
    endless = False
    continues = False
    needs_new_workers = False
    head: StreamHead | None = None

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` at its beginning."""

    @abstractmethod
    def position_after(self, num_batches: int) -> PassPosition:
        """Return the position of all processes after `num_batches` of this one, counted from where the pass began."""

    @abstractmethod
    def skip(self, position: PassPosition) -> None:
        """Skip what was consumed before an interruption; valid until the next epoch."""

    def joined(self, position: PassPosition, gather: Callable[[Any], list[Any]]) -> PassPosition:
        """Return the position of the job from that of this process, which may know only its part; every rank must call.

        Args:
            gather: collects a value of every process.
        """
        return position

    @property
    def position(self) -> PassPosition:
        """The position between two epochs, of a pass that continues."""
        return self.position_after(0)

    @property
    def is_at_start(self) -> bool:
        """True if the pass is known to begin with the first sample of the data."""
        return self.has_position and self.num_consumed == 0

    @property
    def is_used(self) -> bool:
        """False if the loader has not asked for the order of the current pass."""
        return self.order is None or len(self.order) > 0

    def fingerprint(self, position: PassPosition) -> int | None:
        """Return a checksum of the order before a position, which a resumed pass has to repeat; None if unknown."""
        return None

    def expect(self, fingerprint: int | None) -> None:
        """Warn, when the resumed pass is listed, if it has another fingerprint; valid until the next epoch."""

    def ended_order(self) -> EndedOrder | None:
        """Return the order of the last pass, if a sampler may have drawn it from a state of its own."""
        return None

    def repeat_order(self, ended: EndedOrder) -> None:
        """List the order of a pass before the interruption again, and warn if it is another one."""

    def described(self) -> Order | None:
        """Describe the length and order of a pass, which a resumed pass must have as well; None if unknown."""
        return None

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, of all processes; None if unknown."""
        return None

    @property
    def full_size(self) -> int | None:
        """Samples per process in a step that is not uneven; None if unknown."""
        return self.batch_size if self.knows_sizes else None

    def sizes_of(self, number: int) -> Sequence[int | None] | None:
        """Return the samples of each rank in training step `number`, from 0; None in place of an unknown length.

        None if all have a full batch.
        """
        return None

    def first_uneven(self) -> int:
        """Return the first step whose sizes may differ."""
        return 0

    def use_sum(self, start_sum: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        """Find out with other processes when all have ended.

        Args:
            start_sum: starts to sum a tensor over processes and returns a function that waits for the sum.
        """

    def need(self, num_batches: int) -> None:
        """List no more of a long order than the next `num_batches` need; valid until the next epoch."""

    def end_after(self, num_samples: int) -> None:
        """End the pass after `num_samples` more of all processes, if batches can be cut; valid until the next epoch."""

    def steps_for(self, num_samples: int, length: int | None) -> int | None:
        """Count the steps in which all processes together have `num_samples`; None if the sizes are not known.

        Args:
            length: steps of a pass, which may be limited; None if it does not have one.
        """
        if self.batch_size is None:
            return None
        if length is None and self.endless:
            return math.ceil(num_samples / self.stride)
        if not length or self.num_samples is None:
            return None
        passes, rest = divmod(num_samples, min(self.num_samples, length * self.stride))
        return passes * length + math.ceil(rest / self.stride)

    def unpacked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches in what the loader yields."""
        return batches

    def close(self) -> None:
        """Release what outlives an epoch."""


class DividedShare(LoaderShare):
    """The share of data that the processes divide.

    Args:
        batch_size: samples per batch and process; None if whole batches are distributed.
        training: whether all processes take the same number of steps. In a short last step, a rank has none, or if
            possible at least two samples, as batch norm cannot train on one.
        rank, world_size: of the share.
        seed: determines order and random numbers, together with the epoch.
    """

    knows_sizes = True

    def __init__(self, *, batch_size: int | None, training: bool, rank: int, world_size: int, seed: int) -> None:
        self.batch_size, self.training = batch_size, training
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.stride = (batch_size or 1) * world_size
        self.shares_whole_batches = batch_size is None

    def position_after(self, num_batches: int) -> PassPosition:
        return self.num_consumed + num_batches * self.stride

    def num_active_ranks(self, size: int) -> int:
        """Return how many ranks share the `size` samples of a short last step: each gets two or more if possible."""
        return min(self.world_size, max(1, size // min(2, self.batch_size or 1)))

    def sizes_on_ranks(self, size: int) -> list[int]:
        """Return the samples of each rank in a short last step; active ranks take samples in turn."""
        num_active = self.num_active_ranks(size)
        return [len(range(rank, size, num_active)) if rank < num_active else 0 for rank in range(self.world_size)]


class WholeLoader(LoaderShare):
    """The share of a loader that each process reads as it is, and whose position is unknown."""

    has_position = False

    def position_after(self, num_batches: int) -> PassPosition:
        raise TypeError("this loader does not have a position")

    def skip(self, position: PassPosition) -> None:
        raise TypeError("this loader does not have a position")


class AdaptedShare(LoaderShare):
    """The share of a user's loader, made of an object that only has ``position_after`` and ``skip``, as in 0.1.

    Args:
        sampler: the object. If it has a ``set_epoch``, that is called as for any sampler.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        members = SamplerMembers(sampler)
        self.batch_size, self.stride = members.batch_size, members.stride
        self.yields_its_length = members.sampler is not None  # one of torch's

    def position_after(self, num_batches: int) -> PassPosition:
        return self.sampler.position_after(num_batches)

    def skip(self, position: PassPosition) -> None:
        self.sampler.skip(position)

    @property
    def drop_last(self) -> bool | None:
        return SamplerMembers(self.sampler).drop_last

    @drop_last.setter
    def drop_last(self, value: bool | None) -> None:
        self.sampler.drop_last = value

    @property
    def num_consumed(self) -> int:  # type: ignore[override]  # without a default: it would be wrong in a resumed run
        return int(self.sampler.num_consumed)
