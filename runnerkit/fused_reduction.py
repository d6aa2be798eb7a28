"""One sum over processes for all metrics of a loader, which notices when processes do not mean the same metrics."""

import hashlib
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

NUM_FUSED = 64  # metrics that fit into the one reduction; those beyond take a second

Totals = dict[str, tuple[float, int]]  # {metric: (sum, count)}


class Processes(Protocol):
    """What an engine offers here."""

    device: torch.device
    num_processes: int

    def reduce(self, tensor: Tensor, op: Literal["sum"] = "sum") -> Tensor:
        """Sum over processes."""

    def gather_object(self, value: Any) -> list[Any]:
        """Collect a value of every process."""


def reduce_totals(totals: Totals, num_samples: int, *, processes: Processes, loader_key: str) -> tuple[Totals, int]:
    """Add up {metric: (sum, count)} and the number of samples over processes; every rank must call.

    A process that has no metric, since it saw no batch, takes part with zeros. Sums are float64 where the device can.

    Args:
        loader_key: for the message.
    Raises:
        ValueError: processes have different metrics.
    """
    if processes.num_processes == 1:
        return totals, num_samples
    names = sorted(totals)
    values = [float(part) for name in names for part in totals[name]]
    mark = _fingerprint(names)
    added = _add_up([num_samples, *mark, *_padded(values[: 2 * NUM_FUSED], 2 * NUM_FUSED)], processes)
    num_samples, marks, added = round(added[0]), added[1 : 1 + len(mark)], added[1 + len(mark) :]
    if not _is_one_fingerprint(marks):
        listing = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(processes.gather_object(names)))
        raise ValueError(f"loader {loader_key!r}: ranks logged different metrics, so no mean is right: {listing}")
    num_with_names, num_names = round(marks[0]), round(marks[1] / max(1.0, marks[0]))
    if num_names > NUM_FUSED:
        added += _add_up(_padded(values[2 * NUM_FUSED :], 2 * (num_names - NUM_FUSED)), processes)
    order = list(totals)
    if 0 < num_with_names < processes.num_processes:
        order = next(each for each in processes.gather_object(order) if each)
    by_name = dict(zip(sorted(order), zip(added[0::2], map(round, added[1::2]), strict=True), strict=False))
    return {name: by_name[name] for name in order}, num_samples


def _add_up(values: list[float], processes: Processes) -> list[float]:
    dtype = torch.float32 if processes.device.type == "mps" else torch.float64
    summed: list[float] = processes.reduce(torch.tensor(values, dtype=dtype, device=processes.device)).tolist()
    return summed


def _padded(values: list[float], length: int) -> list[float]:
    return values + [0.0] * (length - len(values))


def _fingerprint(names: list[str]) -> list[float]:
    """Numbers whose sums over processes tell whether all that have names have the same: 1, how many, and hashes.

    A hash has 18 bits: the sum of its squares over 131,072 processes is exact in a float64. Two of them let one wrong
    pair of name sets in 2^36 through.
    """
    if not names:
        return [0.0] * 6
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    hashes = [int.from_bytes(digest[start : start + 4]) % 2**18 for start in (0, 4)]
    return [1.0, float(len(names)), *(float(part) for each in hashes for part in (each, each * each))]


def _is_one_fingerprint(sums: list[float]) -> bool:
    # n * sum(h^2) >= sum(h)^2, and equal only if all n of the h are (Cauchy and Schwarz).
    count = round(sums[0])
    return all(count * round(square) == round(each) ** 2 for each, square in zip(sums[2::2], sums[3::2], strict=True))
