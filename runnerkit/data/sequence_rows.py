"""A long sequence as rows that continue from batch to batch, for truncated backpropagation through time."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

from runnerkit.support.arguments import check_integers

__all__ = ["SequenceRows"]


class SequenceRows(Dataset[Tensor]):
    """A sequence cut into `num_rows` contiguous parts; each batch has the next `length` elements.

    Use ``DataLoader(SequenceRows(...), batch_size=num_rows // number of processes)`` without shuffling. Row i of a
    batch then continues row i of the batch before, in every process, so a hidden state fits: see CarriedStateCallback.
    The rest that does not fill a chunk in each row is left out.

    Args:
        sequence: (T, ...).
        num_rows: rows of all processes together; the processes must divide it.
        length: elements of a row in a batch.
        overlap: elements of the next chunk behind them; with 1, ``row[:-1]`` predicts ``row[1:]``.
    Raises:
        ValueError: the sequence is too short for one chunk in each row.

    >>> import torch
    >>> rows = SequenceRows(torch.arange(14), num_rows=2, length=3)
    >>> len(rows), rows[0].tolist(), rows[1].tolist(), rows[2].tolist()
    (4, [0, 1, 2, 3], [7, 8, 9, 10], [3, 4, 5, 6])
    """

    draws_nothing = True

    def __init__(self, sequence: Tensor, *, num_rows: int, length: int, overlap: int = 1) -> None:
        check_integers(self, num_rows=num_rows, length=length)
        self.sequence, self.num_rows, self.length, self.overlap = sequence, num_rows, length, overlap
        self.part = len(sequence) // num_rows  # elements of a row
        self.num_chunks = (self.part - overlap) // length
        if self.num_chunks < 1:
            raise ValueError(
                f"a sequence of {len(sequence)} elements is too short for {num_rows} rows of {length} + {overlap}"
            )

    def check_share(self, sampler: object, stride: int) -> None:
        """Raise if a loader's rows would not continue from batch to batch.

        Args:
            sampler: the loader's.
            stride: samples of all processes in a step.
        Raises:
            ValueError: with what to pass.
        """
        if stride != self.num_rows:
            raise ValueError(
                f"SequenceRows has num_rows={self.num_rows}, but a step takes {stride} samples (batch_size x "
                "processes), so rows would not continue: make them equal"
            )
        if not isinstance(sampler, SequentialSampler):
            raise ValueError("SequenceRows needs its order: omit shuffle and sampler")

    def __len__(self) -> int:
        return self.num_chunks * self.num_rows

    def __getitem__(self, index: int) -> Tensor:
        chunk, row = divmod(range(len(self))[index], self.num_rows)
        start = row * self.part + chunk * self.length
        return self.sequence[start : start + self.length + self.overlap]
