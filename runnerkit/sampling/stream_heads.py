"""Fingerprints of the first samples of a stream, which must be the same in every process."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_SAMPLES = 16
_NUM_LEAVES = 8  # per sample
_NUM_ELEMENTS = 1024  # per tensor, approximately
_READ = 1 << 32  # added to each fingerprint; 0 marks a leaf that was not read


class StreamHead:
    """Fingerprints of the first samples that each worker of this process read, in shared memory.

    Args:
        num_workers: the loader's.
    """

    def __init__(self, num_workers: int) -> None:
        shape = (max(1, num_workers), NUM_SAMPLES, _NUM_LEAVES)
        self.fingerprints = torch.zeros(shape, dtype=torch.int64).share_memory_()

    def note(self, worker: int, position: int, sample: Any) -> None:
        """Record the sample that `worker` read at `position` of the stream, if it is among the first."""
        if position < NUM_SAMPLES and worker < len(self.fingerprints):
            for leaf, value in zip(range(_NUM_LEAVES), _leaves(sample), strict=False):
                self.fingerprints[worker, position, leaf] = _READ + _checksum(value)


def differ(heads: Sequence[Tensor]) -> bool:
    """Return whether the first samples of a stream differ between readers.

    The parts of the samples that differ most from sample to sample decide (an index, a key, an image); if one of them
    is the same everywhere, so is the order, and the others may contain noise.

    Args:
        heads: the `fingerprints` of each process, (workers, samples, leaves).
    """
    readers = torch.cat(list(heads))
    readers = readers[(readers[:, 0] != 0).any(dim=1)]  # a worker may not have started
    if len(readers) < 2:
        return False
    num_common = int((readers != 0).any(dim=2).sum(dim=1).min())
    common = readers[:, :num_common]
    num_distinct = torch.tensor(
        [max(len(each[:, leaf].unique()) for each in common) for leaf in range(common.shape[2])]
    )
    is_same = (common == common[0]).all(dim=1).all(dim=0)
    return not bool(is_same[num_distinct == num_distinct.max()].any())


def _leaves(sample: Any) -> Iterator[Any]:
    if isinstance(sample, Mapping):
        sample = tuple(sample.values())
    if isinstance(sample, list | tuple):
        for each in sample:
            yield from _leaves(each)
    else:
        yield sample


def _checksum(value: Any) -> int:
    if isinstance(value, Tensor) and value.layout == torch.strided:
        flat = value.detach().flatten()
        few = flat[:: 1 + len(flat) // _NUM_ELEMENTS].contiguous().cpu()
        return zlib.crc32(few.view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return zlib.crc32(value.ravel()[:: 1 + value.size // _NUM_ELEMENTS].tobytes())
    if isinstance(value, str | bytes | int | float | np.generic):
        return zlib.crc32(repr(value).encode())
    to_bytes: Any = getattr(value, "tobytes", None)
    if to_bytes is not None and not isinstance(value, np.ndarray):  # a PIL image
        return zlib.crc32(to_bytes())
    return zlib.crc32(type(value).__name__.encode())  # its content is unknown
