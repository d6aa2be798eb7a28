"""The number of lanes that processes and workers divide, so that each sample is read once."""

from __future__ import annotations

from math import gcd
from numbers import Integral
from typing import Any


def checked_lanes(lanes: Any) -> tuple[int, int] | None:
    """Return lanes that a user chose as a tuple of int; None if it is None.

    Raises:
        ValueError: with what was passed.
    """
    if lanes is None:
        return None
    is_pair = isinstance(lanes, tuple | list) and len(lanes) == 2
    if not is_pair or any(isinstance(each, bool) or not isinstance(each, Integral) or each < 1 for each in lanes):
        raise ValueError(f"lanes must be (processes, workers), two numbers >= 1, got {lanes!r}")
    return int(lanes[0]), int(lanes[1])


def check_step(stride: int, lanes: int, turns: int, *, key: str = "") -> None:
    """Raise unless each lane of a turn gives a step equally many samples.

    Raises:
        ValueError: with the numbers.
    """
    if stride % lanes:
        who = f"loader {key!r}: " if key else ""
        raise ValueError(
            f"{who}lanes=({lanes}, {turns}): {lanes} does not divide the {stride} samples of a step (batch_size x "
            "processes); choose lanes, or a batch size, so that it does"
        )


def default_lanes(num_parts: int, stride: int | None) -> tuple[int, int]:
    """Choose at most one lane for each part: turns for up to 8 workers, and the most lanes that divide a step."""
    turns = next(number for number in (8, 4, 2, 1) if number**2 <= num_parts)
    most = num_parts // turns
    return (most if stride is None else next(each for each in range(most, 0, -1) if stride % each == 0)), turns


def even_lanes(num_parts: int, stride: int | None) -> tuple[int, int]:
    """Choose up to 8 x 8 lanes of equally many parts if possible, and 2 x 2 if there are 4 parts.

    Their numbers are powers of two, which most jobs divide, and depend neither on processes nor on workers.
    """
    most = max(gcd(num_parts, 64), next(number for number in (4, 2, 1) if number <= num_parts))
    lanes = gcd(stride or 8, next(number for number in (8, 4, 2, 1) if number**2 <= 2 * most))
    return lanes, min(8, most // lanes)


def can_divide(lanes: int, turns: int, *, stride: int | None, world_size: int, num_workers: int) -> bool:
    """Return whether each lane has one reader, which is a process or one of its workers.

    Args:
        stride: samples in a step of the job; None if whole batches are distributed.
    """
    num_workers = max(1, num_workers)
    if stride is None:
        return lanes * turns % (world_size * num_workers) == 0
    return stride % lanes == 0 and lanes % world_size == 0 and turns % num_workers == 0
