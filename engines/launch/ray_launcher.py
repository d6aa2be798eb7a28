"""The launcher of processes on a Ray cluster, which starts a job again after a failure."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from runnerkit.engines.launch.ray_actor import read_files
from runnerkit.engines.launch.ray_job import ActorJob, NoPlaceError, placed
from runnerkit.engines.launch.spawn import job_folder, result_of
from runnerkit.job_process import JobProcess, Launcher

__all__ = ["RayLauncher"]

logger = logging.getLogger(__name__)

_LINES_S = 1.0  # Ray reads the lines of its processes from files, a few times per second

T = TypeVar("T")
Resources = Mapping[str, float]


class RayLauncher:
    """Processes on a Ray cluster, for ``launcher=`` of the engines over ``torch.distributed``.

    Each process is an actor in a placement group. What the run refers to, such as the model, travels through the object
    store, and the model, the metrics and the callbacks' states come back to the calling process, as from processes of
    this machine. runnerkit must be installed on all nodes.

    Args:
        address: of the cluster, as in ``ray.init``; "auto" finds the one that has this machine as a node. If the script
            has called ``ray.init``, that cluster is used.
        resources: what each process needs, such as ``{"CPU": 8, "GPU": 1}``. None is one CPU, and if the cluster has
            GPUs and the engine's `device` is not "cpu", one GPU.
        max_restarts: how often the job starts again after a process has failed or was lost. It continues from its
            newest checkpoint if the run has ``resume="auto"`` and a logdir that all nodes can reach.

    >>> RayLauncher(max_restarts=3).address
    'auto'
    """

    def __init__(
        self, address: str | None = "auto", *, resources: Resources | None = None, max_restarts: int = 0
    ) -> None:
        if max_restarts < 0:
            raise ValueError(f"max_restarts must be >= 0, got {max_restarts}")
        if resources is not None and (not resources or not all(each > 0 for each in resources.values())):
            raise ValueError(f"resources must be amounts > 0 such as {{'CPU': 8, 'GPU': 1}}, got {dict(resources)}")
        if resources is not None and resources.get("GPU", 1) != 1:
            raise ValueError(f"a process uses one GPU: resources must have 'GPU': 1 or no 'GPU', got {dict(resources)}")
        self.address = address
        self.resources = resources
        self.max_restarts = max_restarts

    def check(self) -> None:
        """Raise if Ray is missing.

        Raises:
            ImportError: it is; the message tells how to install it.
        """
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise ImportError("RayLauncher needs Ray: pip install 'runnerkit[ray]', on all nodes") from error

    def of(self, engine: JobProcess, bounds: tuple[int, int], *, may_use_gpus: bool, timeout_s: float) -> Launcher:
        """Return the launcher of an engine's jobs.

        Args:
            engine: its `num_processes` becomes that of the job.
            bounds: least and largest number of processes.
            timeout_s: seconds to wait for a place for the least number.
        """
        return _JobsOnRay(self, engine, bounds, may_use_gpus=may_use_gpus, timeout_s=timeout_s)


class _JobsOnRay(Launcher):
    def __init__(
        self, cluster: RayLauncher, engine: JobProcess, bounds: tuple[int, int], *, may_use_gpus: bool, timeout_s: float
    ) -> None:
        self._cluster = cluster
        self._engine = engine
        self._bounds = bounds
        self._may_use_gpus = may_use_gpus
        self._timeout_s = timeout_s

    def launch(self, fn: Callable[[], T]) -> T:
        num_restarts, most = 0, self._cluster.max_restarts
        with self._files(fn) as (files, folder):
            while True:
                try:
                    return result_of(self._started(files, folder, streams=False))  # type: ignore[no-any-return]
                except Exception as error:  # not the response to a signal
                    if num_restarts == most or isinstance(error, NoPlaceError):
                        raise
                    num_restarts += 1
                    logger.warning("the job starts again (restart %d of %d): %s", num_restarts, most, error)

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        with self._files(fn) as (files, folder), self._started(files, folder, streams=True) as job:
            yield from job.rounds()

    @contextmanager
    def _files(self, fn: Callable[[], Any]) -> Iterator[tuple[Any, Path]]:
        """Put what the processes need of this one into the object store; yield its reference and a folder."""
        import ray

        connect(self._cluster.address)
        with _without_handler_of_ray(), job_folder(fn) as folder:
            yield ray.put(read_files(folder.iterdir())), folder

    @contextmanager
    def _started(self, files: Any, folder: Path, *, streams: bool) -> Iterator[ActorJob]:
        with (
            TemporaryDirectory(dir=folder) as reports,
            placed(self._resources(), self._bounds, timeout_s=self._timeout_s) as places,
        ):
            self._engine.num_processes = len(places)
            job = ActorJob(Path(reports), places)
            try:
                job.start(files, streams=streams)
                yield job
            finally:
                job.end()

    def _resources(self) -> dict[str, float]:
        import ray

        if self._cluster.resources is not None:
            return dict(self._cluster.resources)
        has_gpus = self._may_use_gpus and ray.cluster_resources().get("GPU", 0) > 0
        return {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}


def connect(address: str | None) -> None:
    """Join a cluster, unless this process has already joined one."""
    import ray

    if not ray.is_initialized():
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=address)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def disconnect() -> None:
    """Leave the cluster, if this process has joined one, after the last lines of its processes have arrived."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        time.sleep(_LINES_S)
        ray.shutdown()


@contextmanager
def _without_handler_of_ray() -> Iterator[None]:
    """Restore the default effect of SIGTERM if the script has called ``ray.init``, whose handler would exit at once."""
    handler = signal.getsignal(signal.SIGTERM)
    is_rays = getattr(handler, "__module__", "").startswith("ray.")
    if not is_rays or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
