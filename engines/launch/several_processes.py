"""Base of the engines whose processes train together."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from runnerkit.engine import EngineOptions, IEngine
from runnerkit.engines.failures.exchange_watch import ExchangeWatch
from runnerkit.engines.failures.failure import record
from runnerkit.engines.failures.lockstep import Lockstep
from runnerkit.engines.failures.root_cause import report_early, root_cause
from runnerkit.engines.failures.watchdog import AgentWatch, is_needed
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.loop.stop_signals import Stopped
from runnerkit.support.platform import refuse_windows

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in torch's __all__


class SeveralProcessesEngine(IEngine, ABC):
    """Base of the engines whose processes train together, and end together if one fails.

    Args:
        options: as in IEngine.
    """

    is_ddp = True

    def __init__(self, **options: Unpack[EngineOptions]) -> None:
        super().__init__(**options)
        self._exchange = ExchangeWatch(self, compares=True)
        self._store: Store | None = None
        self._lockstep: Lockstep | None = None
        self._watch: AgentWatch | None = None

    def check(self) -> None:
        refuse_windows("processes that train together")
        super().check()

    def watch_others(self, store: Store, environment: ProcessEnvironment, *, timeout_s: float) -> None:
        """Begin to report failures and progress to the other processes; every rank must call this.

        Args:
            store: store of the process group.
            timeout_s: seconds that a rank waits for the others at the end of a loader.
        """
        self._store = store
        if environment.is_on_one_machine:  # across machines, the store may become unreachable
            self._lockstep = Lockstep(store, rank=self.rank, world_size=self.world_size, timeout_s=timeout_s)
        self._watch = AgentWatch() if is_needed() else None  # now, as all workers of this machine have started

    def stop_watchdog(self) -> None:
        """Stop watching torchrun; not after a failure, when the watch makes sure that torchrun ends too."""
        if self._watch is not None:
            self._watch.stop()

    def root_cause(self, error: BaseException) -> BaseException:
        """Return what ended the job: `error`, or what another process raised; every rank that fails must call this."""
        if self._store is None or isinstance(error, Stopped):
            return error
        place = {"rank": self.rank, "world_size": self.world_size}
        return root_cause(error, store=self._store, close_group=self.cleanup, **place)

    def cleanup(self) -> None:
        super().cleanup()
        self._exchange.close()
        if self._lockstep is not None:
            self._lockstep.close()
        self._lockstep = self._store = None

    def record_failure(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # SystemExit and KeyboardInterrupt are requests
            if self._store is not None:
                report_early(error, store=self._store, rank=self.rank, world_size=self.world_size)
            record(error, rank=self.rank, world_size=self.world_size)

    def enter_training_loader(self, position: Callable[[], int]) -> None:
        self._exchange.enter_loader()
        if self._lockstep is not None:
            self._lockstep.enter(position)

    def leave_training_loader(self, num_batches: int, *, key: str) -> None:
        if self._lockstep is not None:
            self._lockstep.leave(num_batches, key=key)
