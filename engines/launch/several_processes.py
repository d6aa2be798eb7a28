"""Base of the engines whose processes train together."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Unpack

from runnerkit.engine import EngineOptions, IEngine
from runnerkit.engines.failures.exchange_watch import ExchangeWatch
from runnerkit.engines.failures.job_watch import JobWatch
from runnerkit.support.platform import refuse_windows


class SeveralProcessesEngine(IEngine, ABC):
    """Base of the engines whose processes train together.

    Args:
        options: as in IEngine.
    """

    is_ddp = True

    def __init__(self, **options: Unpack[EngineOptions]) -> None:
        super().__init__(**options)
        self._watch = JobWatch()
        self._exchange = ExchangeWatch(self, compares=True)

    def check(self) -> None:
        refuse_windows("processes that train together")
        super().check()

    def cleanup(self) -> None:
        super().cleanup()
        self._exchange.close()
        self._watch.close()

    def record_failure(self, error: BaseException) -> None:
        self._watch.record(error, rank=self.rank, world_size=self.world_size)

    def enter_training_loader(self, position: Callable[[], int]) -> None:
        self._exchange.enter_loader()
        self._watch.enter_loader(position)

    def leave_training_loader(self, num_batches: int, *, key: str) -> None:
        self._watch.leave_loader(num_batches, key=key)
