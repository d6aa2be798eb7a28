"""Launchers of jobs of several processes: started here, or by a program such as torchrun."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from runnerkit.engines.failures.failure import no_silent_exit
from runnerkit.engines.launch.message_stream import spawn_rounds
from runnerkit.engines.launch.several_processes import SeveralProcessesEngine
from runnerkit.engines.launch.spawn import spawn
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.job_process import Launcher

T = TypeVar("T")
VariablesOf = Callable[[int], dict[str, str]]


class SpawnLauncher(Launcher):
    """Processes of this machine, started for each call and ended with it.

    Args:
        variables: environment variables of all processes; see :func:`.spawn`.
        server: context in which the processes can meet; its value returns further variables for a rank. By default they
            meet without a server, in a file or where MASTER_ADDR says.
    """

    def __init__(
        self,
        num_processes: int,
        *,
        variables: dict[str, str] | None = None,
        server: Callable[[], AbstractContextManager[VariablesOf]] = lambda: nullcontext(lambda rank: {}),
    ) -> None:
        self._job: dict[str, Any] = {"num_processes": num_processes, "variables": variables or {}}
        self._server = server

    def launch(self, fn: Callable[[], T]) -> T:
        with self._server() as variables_of:
            return spawn(fn, variables_of=variables_of, **self._job)

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        with self._server() as variables_of:
            yield from spawn_rounds(fn, variables_of=variables_of, **self._job)


class ExternalLauncher(Launcher):
    """This process of a job that torchrun, srun, mpirun, horovodrun, the user or runnerkit itself has started.

    Args:
        engine: leaves the job after each call, and finds out what ended it.
        environment: place of this process in the job.
    """

    def __init__(self, engine: SeveralProcessesEngine, environment: ProcessEnvironment) -> None:
        self._engine = engine
        self._rank, self._world_size = environment.rank, environment.world_size

    def launch(self, fn: Callable[[], T]) -> T:
        try:
            with no_silent_exit(self._rank, self._world_size):
                result = fn()
            self._engine.stop_watchdog()
            return result
        except BaseException as error:
            cause = self._engine.root_cause(error)
            if cause is error:
                raise
            raise cause from cause.__cause__
        finally:
            self._engine.cleanup()

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        try:
            with no_silent_exit(self._rank, self._world_size):
                yield from self._engine.gather_rounds(fn())
            self._engine.stop_watchdog()
        except GeneratorExit:  # closing the generator early is not a failure
            self._engine.stop_watchdog()
            raise
        finally:
            self._engine.cleanup()
