"""``torch.rand``, ``randn`` and ``randperm`` for the hand-written loops, which stand for one process or for several.

Each process of a run draws from its own generator, and has every n-th sample of a global batch. So for a loop that is
compared with a run of two processes, the even rows are drawn by rank 0's generator, the odd ones by that of rank 1.
"""

from contextlib import contextmanager

import torch

from runnerkit.seeding.generators import derive_seed

_generators = [torch.default_generator]


@contextmanager
def of_processes(num_processes: int, *, seed: int = 42):
    """Draw as so many processes of a run with this seed; as torch does for one."""
    if num_processes == 1:
        yield
        return
    seeds = [seed, *(derive_seed(seed, "rank", rank) for rank in range(1, num_processes))]
    before, _generators[:] = [*_generators], [torch.Generator().manual_seed(each) for each in seeds]
    try:
        yield
    finally:
        _generators[:] = before


def rand(num_rows: int, *shape: int) -> torch.Tensor:
    return _interleaved(torch.rand, num_rows, shape)


def randn(num_rows: int, *shape: int) -> torch.Tensor:
    return _interleaved(torch.randn, num_rows, shape)


def randperm(num_rows: int) -> torch.Tensor:
    """Each process permutes its own rows."""
    parts = [torch.randperm(size, generator=each) for size, each in _own_rows(num_rows)]
    return torch.stack([part * len(parts) + rank for rank, part in enumerate(parts)], dim=1).flatten()


def _interleaved(draw, num_rows, shape):
    parts = [draw(size, *shape, generator=each) for size, each in _own_rows(num_rows)]
    rows = torch.empty(num_rows, *shape)
    for rank, part in enumerate(parts):
        rows[rank :: len(parts)] = part
    return rows


def _own_rows(num_rows):
    ranks = len(_generators)
    return [(len(range(rank, num_rows, ranks)), each) for rank, each in enumerate(_generators)]
