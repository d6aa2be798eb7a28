"""Several ranks within one process: one thread per rank, and every collective waits for all threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from runnerkit.engine import IEngine
from runnerkit.engines import CPUEngine


class Ranks:
    """Engines that gather and reduce among themselves.

    Attributes:
        engines: one per rank.
        num_collectives: number of collectives so far.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_collectives = 0
        self._barrier = Barrier(num_ranks, timeout=60)
        self._given: list[Any] = [None] * num_ranks
        self.engines = [self._engine(rank) for rank in range(num_ranks)]

    def _engine(self, rank: int) -> IEngine:
        engine = CPUEngine()
        engine.process_index, engine.num_processes = rank, len(self._given)

        def gather_object(value: Any) -> list[Any]:
            self._given[rank] = value
            self._barrier.wait()
            everything = list(self._given)
            self._barrier.wait()
            self.num_collectives += rank == 0
            return everything

        def reduce(tensor: Tensor, op: str = "sum") -> Tensor:
            assert op == "sum"
            return torch.stack(gather_object(tensor)).sum(dim=0)

        engine.gather_object = gather_object  # type: ignore[assignment,method-assign]
        engine.reduce = reduce  # type: ignore[assignment,method-assign]
        return engine

    def call(self, *functions: Callable[[], Any]) -> list[Any]:
        """Call one function per rank concurrently and return the results."""
        with ThreadPoolExecutor(len(functions)) as pool:
            futures = [pool.submit(function) for function in functions]
            return [future.result() for future in futures]
