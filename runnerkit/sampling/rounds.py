"""Numbers in place of data, for programs that make their own, such as rollouts of an environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from runnerkit.sampling.share import LoaderShare, PassPosition


class Rounds(LoaderShare):
    """A range as a loader: every process gets all numbers, and a resumed run gets the remaining ones.

    >>> rounds = Rounds(range(5))
    >>> rounds.skip(3)
    >>> list(rounds), len(rounds)
    ([3, 4], 2)
    """

    knows_sizes = True

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    @property
    def _share(self) -> LoaderShare:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.num_consumed = 0

    def position_after(self, num_batches: int) -> PassPosition:
        return self.num_consumed + num_batches

    def skip(self, position: PassPosition) -> None:
        self.num_consumed = position

    def first_uneven(self) -> int:
        """Return a step that is never reached: no process lacks a number."""
        return sys.maxsize

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers[self.num_consumed :])

    def __len__(self) -> int:
        return max(0, len(self.numbers) - self.num_consumed)
