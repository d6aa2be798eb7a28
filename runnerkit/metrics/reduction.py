"""The reduction of all metrics of a loader over processes, with a check that the processes agree."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from runnerkit.types import widest_float

__all__ = ["PartialSums", "Share"]

T = TypeVar("T")

NUM_FUSED = 16_384  # numbers in the first reduction (128 KiB); further ones take a second reduction


@dataclass(frozen=True)
class PartialSums:
    """The data from which a metric is computed: the part of one process, or the total of all.

    Attributes:
        sums: float or integer tensors by name, which are summed over processes.
        others: data that cannot be summed, of picklable types such as tensors; the lists of all processes are
            concatenated in order of rank.
        rows: float or integer tensors by name, which are stacked over processes: in the total they are in `sums`, with
            one row for each process, zero if it saw nothing.
    """

    sums: dict[str, Tensor]
    others: list[Any] = field(default_factory=list)
    rows: dict[str, Tensor] = field(default_factory=dict)

    def placed(self, index: int, num_shares: int) -> PartialSums:
        """Return a part whose sum with the parts of the other indices is the total.

        >>> PartialSums({}, rows={"first": torch.tensor(7)}).placed(1, 3).sums
        {'first': tensor([0, 7, 0])}
        """
        sums = dict(self.sums)
        for name, each in self.rows.items():
            sums[name] = each.new_zeros((num_shares, *each.shape))
            sums[name][index] = each
        return PartialSums(sums, self.others)


Share = PartialSums  # its name in 0.1
SumsByOwner: TypeAlias = dict[str, PartialSums | None]  # by owner; None if this process has seen nothing
Entries: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]  # {name: (shape, dtype)}
Layout: TypeAlias = dict[str, Entries | None]


class Processes(Protocol):
    """Processes that each see a part of the samples: an engine's."""

    device: torch.device
    num_processes: int

    @property
    @abstractmethod
    def rank(self) -> int:
        """The position of this process, from 0."""

    @abstractmethod
    def reduce(self, tensor: Tensor, op: Literal["sum"] = "sum") -> Tensor:
        """Sum over processes."""

    @abstractmethod
    def start_sum(self, value: Tensor) -> Callable[[], Tensor]:
        """Start to sum over processes; return a function that waits for the sum."""

    @abstractmethod
    def gather_object(self, value: T) -> list[T]:
        """Collect a value of every process."""


def reduce_sums(parts: SumsByOwner, *, processes: Processes, loader_key: str) -> SumsByOwner:
    """Reduce the sums of each owner over all processes; every rank must call, even without a batch.

    This takes one reduction, or two above 16,384 numbers, in float64 if the device supports it; integers stay exact and
    every sum keeps its dtype. If any process has `others`, one gather for all of them follows. If a process lacks sums
    that another has, the processes first exchange their layouts, which takes one more gather and one more reduction.

    Args:
        parts: by owner, whose name appears in error messages.
        loader_key: for error messages.
    Raises:
        ValueError: processes have different sums of one owner: other names, shapes or dtypes.
    """
    rank, num_processes = processes.rank, processes.num_processes
    parts = {owner: part and part.placed(rank, num_processes) for owner, part in parts.items()}
    if num_processes == 1:
        return parts
    layout: Layout = {owner: _entries(part) for owner, part in parts.items()}
    values = _flatten(parts, layout, processes.device)
    mark = [*_fingerprint(layout), float(any(part.others for part in parts.values() if part is not None))]
    header = torch.tensor(mark, dtype=values.dtype, device=values.device)
    padding = values.new_zeros(max(0, NUM_FUSED - len(values)))
    added = processes.reduce(torch.cat([header, values[:NUM_FUSED], padding]))
    *marks, num_with_others = added[: len(mark)].tolist()
    if not _is_one_fingerprint(marks, num_processes):
        layout = _agree(processes.gather_object(layout), loader_key=loader_key)
        sums = processes.reduce(_flatten(parts, layout, processes.device))
    else:
        sums = added[len(mark) : len(mark) + len(values)]
        if len(values) > NUM_FUSED:
            sums = torch.cat([sums[:NUM_FUSED], processes.reduce(values[NUM_FUSED:])])
    others = _gather(parts, processes) if num_with_others else {}
    totals = _unflatten(sums, layout)
    return {
        owner: PartialSums(totals[owner], others.get(owner, [])) if layout[owner] is not None else None
        for owner in layout
    }


def _entries(part: PartialSums | None) -> Entries | None:
    return None if part is None else {name: (tuple(each.shape), each.dtype) for name, each in part.sums.items()}


def _slots(layout: Layout) -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype]]:
    """Yield (owner, name, shape, dtype) in an order that is the same on all processes."""
    for owner in sorted(layout):
        for name, (shape, dtype) in sorted((layout[owner] or {}).items()):
            yield owner, name, shape, dtype


def _flatten(parts: SumsByOwner, layout: Layout, device: torch.device) -> Tensor:
    dtype = widest_float(device)
    pieces = [torch.zeros(0, dtype=dtype, device=device)]
    for owner, name, shape, of_sum in _slots(layout):
        part = parts.get(owner)
        value = torch.zeros(shape, dtype=of_sum) if part is None else part.sums[name]
        value = value.detach().to(device).reshape(-1)
        if of_sum.is_floating_point:
            pieces.append(value.to(dtype))
        else:  # two halves, whose sums over any number of processes are exact in float64
            pieces += [(value.long() >> 32).to(dtype), (value.long() & (2**32 - 1)).to(dtype)]
    return torch.cat(pieces)


def _unflatten(values: Tensor, layout: Layout) -> dict[str, dict[str, Tensor]]:
    found: dict[tuple[str, str], Tensor] = {}
    start = 0
    for owner, name, shape, dtype in _slots(layout):
        size = math.prod(shape)
        piece = values[start : start + size]
        start += size
        if not dtype.is_floating_point:
            piece = (piece.long() << 32) + values[start : start + size].long()
            start += size
        found[owner, name] = piece.to(dtype).reshape(shape)
    return {owner: {name: found[owner, name] for name in layout[owner] or {}} for owner in layout}


def _gather(parts: SumsByOwner, processes: Processes) -> dict[str, list[Any]]:
    others = {owner: on_cpu(part.others) for owner, part in parts.items() if part is not None}
    ranks = processes.gather_object(others)
    return {owner: [each for rank in ranks for each in rank.get(owner, [])] for rank in ranks for owner in rank}


def on_cpu(value: Any) -> Any:
    """Copy tensors in nested lists and dicts to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_cpu(each) for key, each in value.items()}
    return [on_cpu(each) for each in value] if isinstance(value, list) else value


def _agree(layouts: list[Layout], *, loader_key: str) -> Layout:
    """Return the common layout of all processes that have sums.

    Raises:
        ValueError: their layouts differ.
    """
    agreed: Layout = {}
    for owner in dict.fromkeys(owner for layout in layouts for owner in layout):
        of_ranks = [layout.get(owner) for layout in layouts]
        agreed[owner] = next((entries for entries in of_ranks if entries is not None), None)
        if any(entries is not None and entries != agreed[owner] for entries in of_ranks):
            listing = "; ".join(f"rank {rank}: {_describe(each, of_ranks)}" for rank, each in enumerate(of_ranks))
            raise ValueError(f"loader {loader_key!r}: ranks differ in {owner}, which cannot be reduced: {listing}")
    return agreed


def _describe(entries: Entries | None, of_ranks: list[Entries | None]) -> str:
    if entries is None:
        return "no batch"
    if any(other is not None and other.keys() != entries.keys() for other in of_ranks):
        return str(sorted(entries))
    return ", ".join(f"{name} {str(dtype)[6:]}{list(shape)}" for name, (shape, dtype) in sorted(entries.items()))


def _fingerprint(layout: Layout) -> list[float]:
    """Return numbers whose sums over processes show if all have the same layout: hashes and their squares.

    A hash has 18 bits, so that the sum of its squares over 131,072 processes is exact in float64. With two hashes, one
    in 2^36 pairs of different layouts remains undetected.
    """
    slots = [*_slots(layout), *(owner for owner in sorted(layout) if layout[owner] is None)]
    digest = hashlib.sha256(repr(slots).encode()).digest()
    hashes = [int.from_bytes(digest[start : start + 4]) % 2**18 for start in (0, 4)]
    return [float(part) for each in hashes for part in (each, each * each)]


def _is_one_fingerprint(sums: list[float], num_processes: int) -> bool:
    # n * sum(h^2) >= sum(h)^2, with equality only if all n hashes are equal (Cauchy-Schwarz inequality).
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return all(num_processes * round(square) == round(each) ** 2 for each, square in pairs)
