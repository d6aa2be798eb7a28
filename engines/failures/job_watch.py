"""Reports of this process to the others of its job, so that all end together."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in torch's __all__

from runnerkit.engines.failures.failure import record
from runnerkit.engines.failures.lockstep import Lockstep
from runnerkit.engines.failures.root_cause import root_cause, tell_early
from runnerkit.engines.failures.watchdog import AgentWatch, is_needed
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.loop.stop_signals import Stopped


class JobWatch:
    """A process's failures and its progress, as the other processes see them.

    Without :meth:`open`, there is nothing but the report to the process that started this one.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._lockstep: Lockstep | None = None
        self._agent: AgentWatch | None = None

    def open(self, store: Store, environment: ProcessEnvironment, *, timeout_s: float) -> None:
        """Begin to report; every rank must call this.

        Args:
            store: store of the process group.
            timeout_s: seconds that a rank waits for the others at the end of a loader.
        """
        self._store = store
        if environment.is_on_one_machine:  # across machines, the store may become unreachable
            place = {"rank": environment.rank, "world_size": environment.world_size}
            self._lockstep = Lockstep(store, **place, timeout_s=timeout_s)
        self._agent = AgentWatch() if is_needed() else None  # now, as all workers of this machine have started

    def record(self, error: BaseException, *, rank: int, world_size: int) -> None:
        """Report an error before anything else can fail."""
        if isinstance(error, Exception):  # SystemExit and KeyboardInterrupt are requests
            if self._store is not None:
                tell_early(error, store=self._store, rank=rank, world_size=world_size)
            record(error, rank=rank, world_size=world_size)

    def root_cause(
        self, error: BaseException, *, rank: int, world_size: int, leave: Callable[[], None]
    ) -> BaseException:
        """Return what ended the job: `error`, or what another process raised; every rank that fails must call this.

        Args:
            leave: closes the process group.
        """
        if self._store is None or isinstance(error, Stopped):
            return error
        return root_cause(error, store=self._store, rank=rank, world_size=world_size, leave=leave)

    def enter_loader(self, position: Callable[[], int]) -> None:
        """Begin a training loader; see :class:`.Lockstep`."""
        if self._lockstep is not None:
            self._lockstep.enter(position)

    def leave_loader(self, num_batches: int, *, key: str) -> None:
        """End a training loader together with the others; see :class:`.Lockstep`."""
        if self._lockstep is not None:
            self._lockstep.leave(num_batches, key=key)

    def stand_down(self) -> None:
        """Stop watching torchrun; not after a failure, when the watch makes sure that torchrun ends too."""
        if self._agent is not None:
            self._agent.stand_down()

    def close(self) -> None:
        """Stop reporting; safe to call twice."""
        if self._lockstep is not None:
            self._lockstep.close()
        self._lockstep = self._store = None
