"""A runner's public attributes without a loop, and several ranks within one process."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

from runnerkit.engine import IEngine
from runnerkit.engines import CPUEngine


def make_runner(**attributes: Any) -> Any:
    """What callbacks may read and write, in the middle of the first epoch's training loader."""
    defaults = {
        "engine": CPUEngine(),
        "stage_key": "train",
        "loader_key": "train",
        "is_train_loader": True,
        "epoch_step": 1,
        "stage_epoch_step": 1,
        "stage_epoch_len": 3,
        "loader_batch_step": 0,
        "loader_batch_len": None,
        "loaders": {},
        "batch": {},
        "batch_size": 1,
        "batch_metrics": {},
        "loader_metrics": {},
        "epoch_metrics": {},
        "need_early_stop": False,
    }
    return SimpleNamespace(**(defaults | attributes))


class _Waiting(Exception):
    pass


class Ranks:
    """Engines that meet in ``gather_object``, without processes: each rank calls once to give, once to get."""

    def __init__(self, num_ranks: int) -> None:
        self._gathered: list[Any] = [None] * num_ranks
        self._is_giving = False
        self.engines = [self._engine(rank) for rank in range(num_ranks)]

    def _engine(self, rank: int) -> IEngine:
        engine = CPUEngine()
        engine.process_index, engine.num_processes = rank, len(self._gathered)

        def gather_object(value: Any) -> list[Any]:
            if self._is_giving:
                self._gathered[rank] = value
                raise _Waiting
            return list(self._gathered)

        engine.gather_object = gather_object  # type: ignore[assignment,method-assign]
        return engine

    def call(self, *functions: Callable[[], Any]) -> list[Any]:
        """Call a function of each rank, which enters one collective."""
        self._is_giving = True
        for function in functions:
            with suppress(_Waiting):
                function()
        self._is_giving = False
        return [function() for function in functions]


def run_loader(callback: Any, runner: Any, batches: list[dict[str, torch.Tensor]]) -> None:
    """Start a loader and run its batches; the end is the test's."""
    callback.on_loader_start(runner)
    for batch in batches:
        runner.batch, runner.batch_size = batch, len(next(iter(batch.values())))
        runner.batch_metrics = {}
        runner.loader_batch_step += 1
        callback.on_batch_end(runner)
