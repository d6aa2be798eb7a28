"""Fingerprints of the first samples of a stream, which must be the same in every process."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from runnerkit.support.members import Member, Members
from runnerkit.support.plain_values import attributes_of

NUM_SAMPLES = 16
_NUM_LEAVES = 32  # per sample; the last one stands for all further ones
_MOST_LEAVES = 1024  # that are read
_NUM_ELEMENTS = 1024  # per tensor, approximately
_DEPTH = 8  # of nested containers and objects
_LONGEST_KEY = 18  # characters that are searched for a number
_READ_MARK = 1 << 32  # added to each fingerprint; 0 marks a leaf that was not read


class _LeafMembers(Members):
    tobytes = Member[Callable[[], bytes] | None](None)  # of a PIL image


class StreamHead:
    """Fingerprints of the first samples that each worker of this process read, in shared memory.

    For each leaf there are two: one of its value, and the distance of a number in it from the sample's position.

    Args:
        num_workers: the loader's.
    """

    def __init__(self, num_workers: int) -> None:
        shape = (max(1, num_workers), NUM_SAMPLES, _NUM_LEAVES, 2)
        self.fingerprints = torch.zeros(shape, dtype=torch.int64).share_memory_()

    def note(self, worker: int, position: int, sample: Any) -> None:
        """Record the sample that `worker` read at `position` of the stream, if it is among the first."""
        if position < NUM_SAMPLES and worker < len(self.fingerprints):
            place, found = self.fingerprints[worker, position], torch.tensor(_fingerprints(sample, position))
            place[1:] = found[1:]
            place[0, 1] = found[0, 1]
            place[0, 0] = found[0, 0]  # last: with it, the sample counts as recorded

    def read(self) -> Tensor:
        """Return the fingerprints of the samples that are recorded, while workers record further ones."""
        is_recorded = self.fingerprints[..., 0, 0] != 0  # first, as the rest was written before
        return torch.where(is_recorded[..., None, None], self.fingerprints, 0)


def compare(heads: Sequence[Tensor]) -> Literal["same", "different", "only numbered alike"]:
    """Compare the first samples of a stream between readers.

    The parts of the samples that differ most from sample to sample decide (an index, a key, an image); if one of them
    is the same everywhere, so is the order, and the others may contain noise. If it is only the number of the sample,
    either the others contain noise, or each reader numbers samples of its own.

    Args:
        heads: what :meth:`StreamHead.read` returned in each process, (workers, samples, leaves, 2).
    """
    readers = torch.cat(list(heads))
    readers = readers[(readers[:, 0, :, 0] != 0).any(dim=1)]  # a worker may not have started
    if len(readers) < 2:
        return "same"
    num_common = int((readers[..., 0] != 0).any(dim=2).sum(dim=1).min())
    values, distances = readers[:, :num_common].unbind(-1)
    is_number = (distances == distances[:1, :1]).all(dim=1).all(dim=0) & (distances[0, 0] != 0)  # it only counts
    num_distinct = torch.tensor([max(len(each[:, leaf].unique()) for each in values) for leaf in range(_NUM_LEAVES)])
    is_same = (values == values[0]).all(dim=1).all(dim=0)
    if not is_same[num_distinct == num_distinct.max()].any():
        return "different"
    is_content = (num_distinct > 1) & ~is_number
    return "only numbered alike" if is_content.any() and not is_same[is_content].any() else "same"


def fingerprint_of(sample: Any) -> int:
    """Hash the parts of a sample or batch; of a large part, hash about a thousand elements."""
    found = 0
    for value in _leaves(sample):
        found = zlib.crc32(_bytes(value), found)
    return found


def _fingerprints(sample: Any, position: int) -> list[tuple[int, int]]:
    found = [(0, 0)] * _NUM_LEAVES
    for number, value in enumerate(islice(_leaves(sample), _MOST_LEAVES)):
        leaf = min(number, _NUM_LEAVES - 1)
        try:
            content, counter = _bytes(value), _number(value) if leaf == number else None
        except Exception:  # any object of the user
            content, counter = _name_of_type(value), None
        distance = 0 if counter is None else _READ_MARK + counter - position
        found[leaf] = _READ_MARK + zlib.crc32(content, found[leaf][0] % _READ_MARK), distance
    return found


def _leaves(sample: Any, depth: int = 0) -> Iterator[Any]:
    try:
        parts = _parts(sample) if depth < _DEPTH else None
    except Exception:  # any object of the user
        parts = None
    if parts is None:
        yield sample
    else:
        for each in parts:
            yield from _leaves(each, depth + 1)


def _parts(sample: Any) -> Iterable[Any] | None:
    """Return the parts of a container, an object array, a sparse tensor or an object with attributes, else None."""
    if isinstance(sample, Mapping):
        return [sample[key] for key in sorted(sample, key=repr)]  # a key's place may differ between processes
    if isinstance(sample, list | tuple | deque):
        return sample
    if isinstance(sample, AbstractSet):
        return sorted(sample, key=repr)
    if isinstance(sample, np.ndarray):
        return sample.ravel().tolist() if sample.dtype.hasobject else None
    if isinstance(sample, Tensor):
        if sample.layout == torch.strided:
            return sample.unbind() if sample.is_nested else None
        sparse = sample.to_sparse_coo().coalesce()
        return sparse.indices(), sparse.values()
    has_bytes = _LeafMembers(sample).tobytes is not None
    if has_bytes or isinstance(sample, type | PurePath) or callable(sample):
        return None
    attributes = dict(attributes_of(sample))
    for each in type(sample).__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            attributes[name] = getattr(sample, name, None)
    return tuple(attributes.values()) or None


def _number(value: Any) -> int | None:
    """Return a whole number, or the last one in a text, such as 12 of "sample-0012"."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.item() if np.prod(value.shape) == 1 else None
    if isinstance(value, str):
        digits = re.findall(r"\d+", value[-_LONGEST_KEY:])
        return int(digits[-1]) if digits else None
    return value if isinstance(value, int) and abs(value) < _READ_MARK else None


def _bytes(value: Any) -> bytes:
    """Return the content of a leaf, or the name of its type if the content is unknown."""
    if isinstance(value, Tensor):
        flat = value.detach().resolve_conj().resolve_neg().flatten()
        few = flat[:: 1 + len(flat) // _NUM_ELEMENTS].contiguous().cpu()
        return few.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.ravel()[:: 1 + value.size // _NUM_ELEMENTS].tobytes()
    if isinstance(value, str | bytes | bytearray | int | float | complex | np.generic | PurePath | range):
        return repr(value).encode()
    to_bytes = _LeafMembers(value).tobytes
    return to_bytes() if to_bytes is not None else _name_of_type(value)


def _name_of_type(value: Any) -> bytes:
    return type(value).__name__.encode()
