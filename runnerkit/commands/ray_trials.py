"""Trials of a search as tasks on a Ray cluster; their study is in the calling process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runnerkit.commands.config import Config
    from runnerkit.monitor import Monitor

logger = logging.getLogger(__name__)

_MOST_CALLS = 100_000  # at the same time, to the actor for reports
_LOCKED_S = 120.0  # for the lock of a lost node to end; on NFS it takes about a minute
_PAUSE_S = 1.0


class Reports:
    """Actor that passes the metrics of trials to the calling process, and its answers back.

    Its process imports this module only, which imports torch where it is used.
    """

    def __init__(self) -> None:
        self._ids = count()
        self._received: asyncio.Queue[tuple[int, int, float, int]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[bool]] = {}

    async def send(self, number: int, score: float, step: int) -> bool:
        """Return whether the study prunes trial `number`, which calls this."""
        report = next(self._ids)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[report] = answer
        await self._received.put((report, number, score, step))
        return await answer

    async def receive(self) -> tuple[int, int, float, int]:
        """Return the id of a report, and its values, to the calling process."""
        return await self._received.get()

    async def answer(self, report: int, prunes: bool) -> None:
        """Pass on the calling process's answer."""
        self._answers.pop(report).set_result(prunes)


class RemoteTrial:
    """A trial for :class:`.OptunaPruningCallback`, in a process without its study."""

    def __init__(self, number: int, reports: Any) -> None:
        self.number = number
        self._reports = reports
        self._prunes = False

    def report(self, score: float, step: int) -> None:
        """Send the metric of an epoch to the study, and wait for its answer."""
        import ray

        self._prunes = ray.get(self._reports.send.remote(self.number, score, step))

    def should_prune(self) -> bool:
        """Return the answer to the last report."""
        return self._prunes


def optimize(
    study: Any,
    config_of: Callable[[Any], Config],
    *,
    num_trials: int,
    num_processes: int,
    may_use_gpus: bool,
    logdir: Path,
    monitor: Monitor,
) -> None:
    """Train the trials of a study on a Ray cluster, as many at the same time as it has room for.

    If a node is lost, Ray starts its trials again on another one.

    Args:
        config_of: makes the config of a trial.
        num_processes: of a trial, which gets as many CPUs of a node and, if the cluster has GPUs, as many GPUs.
    Raises:
        Exception: as without Ray, by the first trial that fails; the others are ended.
    """
    from runnerkit.engines.launch.ray_launcher import RayLauncher

    RayLauncher().check()
    import ray

    with _cluster() as reports:
        has_gpus = may_use_gpus and ray.cluster_resources().get("GPU", 0) > 0
        needed = {"CPU": num_processes, "GPU": num_processes} if has_gpus else {"CPU": num_processes}
        task = ray.remote(train_here)
        options = {"num_cpus": num_processes, "num_gpus": needed.get("GPU", 0)}
        received = reports.receive.remote()
        running = dict[Any, Any]()  # trials by the references of their scores
        num_left = num_trials
        try:
            while num_left or running:
                num_new = min(num_left, _room(needed) - len(running)) if num_left else 0
                for _ in range(num_new):
                    trial = study.ask()
                    named = task.options(**options, name=f"trial-{trial.number:03}")  # Ray prints it before each line
                    where = (logdir, sys.path, os.getcwd())
                    running[named.remote(config_of(trial), trial.number, monitor, reports, *where)] = trial
                    num_left -= 1
                [ready], _ = ray.wait([received, *running])
                if ready == received:
                    report, number, score, step = ray.get(received)
                    reports.answer.remote(report, prunes(running.values(), number, score, step))
                    received = reports.receive.remote()
                else:
                    _tell(study, running.pop(ready), ready)
        finally:
            for result in running:
                ray.cancel(result, force=True)


def _room(needed: Mapping[str, float]) -> int:
    """Return how many trials the cluster has room for; at least one, which waits for a node."""
    import ray

    from runnerkit.engines.launch.ray_job import num_in_nodes

    room = num_in_nodes(needed, ray.nodes())
    if room == 0:
        logger.warning("the cluster lacks a node with %s: the trials wait for one", needed)
    return max(room, 1)


def prunes(trials: Iterable[Any], number: int, score: float, step: int) -> bool:
    """Report the metric of an epoch to a trial; return whether its study prunes it.

    A trial that has ended is pruned: this is an attempt on a node that was taken for lost.
    """
    trial = next((each for each in trials if each.number == number), None)
    if trial is None:
        return True
    trial.report(score, step)
    return bool(trial.should_prune())


@contextmanager
def _cluster() -> Iterator[Any]:
    """Join the cluster; yield an actor for reports, which is on this node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from runnerkit.engines.launch.ray_launcher import connect, disconnect

    connect("auto")
    try:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Each trial may wait there for an answer: with Ray's default of 1000 calls, so many would block the answers.
        options = {"num_cpus": 0, "max_concurrency": _MOST_CALLS, "scheduling_strategy": here}
        yield ray.remote(Reports).options(**options).remote()
    finally:
        disconnect()


def train_here(
    config: Config, number: int, monitor: Monitor, reports: Any, logdir: Path, paths: list[str], folder: str
) -> float:
    """Train a trial in this process of the cluster; return its score."""
    from runnerkit.commands.config import TrainingError
    from runnerkit.commands.trial import train_trial
    from runnerkit.engines.launch.ray_actor import resemble_caller
    from runnerkit.storage.logdir_lock import LogdirInUse

    resemble_caller(paths, folder)
    trial, deadline = RemoteTrial(number, reports), time.monotonic() + _LOCKED_S
    while True:
        try:
            return train_trial(config, trial, logdir, monitor, resume="auto")
        except (LogdirInUse, TrainingError) as error:  # perhaps an attempt on a node that was lost has the logdir
            is_in_use = isinstance(error, LogdirInUse) or isinstance(error.__cause__, LogdirInUse)
            if not is_in_use or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def _tell(study: Any, trial: Any, result: Any) -> None:
    """Tell the study the score of a trial, or that the trial is pruned; raise what the trial raised."""
    import ray

    from runnerkit.commands.config import TrainingError
    from runnerkit.commands.trial import optuna_package

    optuna = optuna_package()
    try:
        study.tell(trial, ray.get(result))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, optuna.TrialPruned):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif isinstance(error.cause, TrainingError):
            raise TrainingError from error  # its message has the traceback
        else:
            raise error.cause from error
    except ray.exceptions.RayError as error:  # the trial was killed, also after Ray has started it again
        raise TrainingError from error
