"""Launchers of jobs of several processes: started here, or by a program such as torchrun."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from runnerkit.engines.failures.failure import no_silent_exit
from runnerkit.engines.failures.job_watch import JobWatch
from runnerkit.engines.launch.message_stream import spawn_rounds
from runnerkit.engines.launch.spawn import spawn
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.launcher import Launcher, Member

T = TypeVar("T")
VariablesOf = Callable[[int], dict[str, str]]


@contextmanager
def no_server() -> Iterator[VariablesOf]:
    """Let the processes meet without a server, in a file or where MASTER_ADDR says."""
    yield lambda rank: {}


class StartedHere(Launcher):
    """Processes of this machine, started for each call and ended with it.

    Args:
        variables: environment variables of all processes; see :func:`.spawn`.
        server: context in which the processes can meet; its value returns further variables for a rank.
    """

    def __init__(
        self,
        num_processes: int,
        *,
        variables: dict[str, str] | None = None,
        server: Callable[[], AbstractContextManager[VariablesOf]] = no_server,
    ) -> None:
        self._num_processes, self._variables, self._server = num_processes, variables or {}, server

    def launch(self, fn: Callable[[], T]) -> T:
        with self._server() as variables_of:
            return spawn(fn, num_processes=self._num_processes, variables=self._variables, variables_of=variables_of)

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        with self._server() as variables_of:
            yield from spawn_rounds(
                fn, num_processes=self._num_processes, variables=self._variables, variables_of=variables_of
            )


class StartedElsewhere(Launcher):
    """This process of a job that torchrun, srun, mpirun, horovodrun, the user or runnerkit itself has started.

    Args:
        member: leaves the job after each call.
        environment: place of this process in the job.
        watch: finds out what ended the job.
    """

    def __init__(self, member: Member, environment: ProcessEnvironment, watch: JobWatch) -> None:
        self._member, self._watch = member, watch
        self._rank, self._world_size = environment.rank, environment.world_size

    def launch(self, fn: Callable[[], T]) -> T:
        try:
            with no_silent_exit(self._rank, self._world_size):
                result = fn()
            self._watch.stand_down()
            return result
        except BaseException as error:
            place = {"rank": self._rank, "world_size": self._world_size}
            cause = self._watch.root_cause(error, **place, leave=self._member.cleanup)
            if cause is error:
                raise
            raise cause from cause.__cause__
        finally:
            self._member.cleanup()

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        try:
            with no_silent_exit(self._rank, self._world_size):
                yield from self._member.gather_rounds(fn())
            self._watch.stand_down()
        except GeneratorExit:  # closing the generator early is not a failure
            self._watch.stand_down()
            raise
        finally:
            self._member.cleanup()
