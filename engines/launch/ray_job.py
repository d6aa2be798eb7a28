"""A job's processes as actors of a Ray cluster: where they are, how they begin, what ended them."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runnerkit.engines.failures.failure import WorkerError, cause_of_end, is_cause_known
from runnerkit.engines.launch.ray_actor import Files, Met, RankActor, write_files
from runnerkit.engines.process_environment import STORE_VARIABLE
from runnerkit.loop.stop_signals import FOLDER_VARIABLE, PASSED_ON
from runnerkit.support import pickling

logger = logging.getLogger(__name__)

_WAIT_S = 0.2  # until the calling process looks for a signal that it received
_CAUSE_S = 5.0  # from a rank that lost another one to the news of what happened to that one
_GRACE_S = 3.0  # from SIGTERM (close files) to the end of an actor
_DELETE_S = 10.0  # for tasks that delete folders, whose processes must start
_PLACE_S = 10.0  # without a place for all processes: time until fewer are tried, or until a warning
_FEWER_S = 3.0  # for Ray to find a place for fewer processes, which should be there
_SEARCH_S = 30.0  # for numbers that free parts of nodes may be too small for; then only the least is tried
_MAX_AHEAD = 2  # values of a process that the calling process has not received yet
_OPTION_OF = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # others are passed as `resources`


class NoPlaceError(TimeoutError):
    """The cluster had no place for a job for too long."""


@dataclass
class Place:
    """A rank's actor and node.

    Attributes:
        host: IP address of the node.
        met: answer of the actor's process to the first call.
    """

    actor: Any
    node: str
    host: str
    local_rank: int
    met: Met = field(default_factory=Met)


@contextmanager
def placed(resources: dict[str, float], bounds: tuple[int, int], *, timeout_s: float) -> Iterator[list[Place]]:
    """Start an actor for each rank, in few nodes and in the order of nodes; kill them when the context exits.

    Their number is the largest within the bounds for which there is room.
    Rank zero, which writes the logs, comes to the calling process's node if there is room for one.
    """
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    with _group_in_room(resources, bounds, timeout_s) as group:
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        own = ray.get_runtime_context().get_node_id()
        bundles = sorted(nodes, key=lambda each: (nodes[each] != own, hosts[nodes[each]], nodes[each], each))
        known = {_OPTION_OF[name]: amount for name, amount in resources.items() if name in _OPTION_OF}
        others = {name: amount for name, amount in resources.items() if name not in _OPTION_OF}
        actor_class = ray.remote(RankActor)  # once, as each would be exported to the cluster
        places: list[Place] = []
        for rank, bundle in enumerate(bundles):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            options = {"num_cpus": 0, **known, "resources": others, "scheduling_strategy": where}
            actor = actor_class.options(**options).remote(rank)
            local_rank = sum(place.node == nodes[bundle] for place in places)
            places.append(Place(actor, nodes[bundle], hosts[nodes[bundle]], local_rank))
        yield places


@contextmanager
def _group_in_room(resources: dict[str, float], bounds: tuple[int, int], timeout_s: float) -> Iterator[Any]:
    """Make the largest placement group within the bounds for which there is room; wait while there is too little."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    least, most = bounds
    deadline = time.monotonic() + timeout_s
    groups = [placement_group([resources] * most, strategy="PACK")]  # an autoscaler sees it while fewer are tried
    try:
        while not groups[0].wait(_PLACE_S):
            fitting = min(num_fitting(resources, ray.available_resources()), num_in_nodes(resources, ray.nodes()))
            until = time.monotonic() + _SEARCH_S
            for count in range(min(fitting, most - 1), least - 1, -1):
                if count > least and time.monotonic() > until:
                    continue
                groups.append(placement_group([resources] * count, strategy="PACK"))
                if groups[1].wait(_FEWER_S):
                    remove_placement_group(groups.pop(0))
                    break
                remove_placement_group(groups.pop())
            else:
                words = f"the cluster lacks a place for {least} x {resources}: its nodes have {ray.cluster_resources()}"
                if time.monotonic() > deadline:
                    raise NoPlaceError(f"{words}; waited for the engine's timeout_s={timeout_s:g}")
                logger.warning("%s, of which %s are free; waiting", words, ray.available_resources())
        yield groups[0]
    finally:
        for group in groups:
            remove_placement_group(group)


def num_fitting(resources: Mapping[str, float], free: Mapping[str, float]) -> int:
    """Return how many times free resources contain those of a process.

    >>> num_fitting({"CPU": 0.1, "GPU": 1}, {"CPU": 0.3, "GPU": 8}), num_fitting({"GPU": 1}, {"CPU": 4})
    (3, 0)
    """
    return min(int(free.get(name, 0) / amount + 1e-6) for name, amount in resources.items())


def num_in_nodes(resources: Mapping[str, float], nodes: Iterable[Mapping[str, Any]]) -> int:
    """Return how many processes fit into nodes that have nothing else to do, each into one node.

    Args:
        nodes: as ``ray.nodes`` returns them.

    >>> nodes = [{"Alive": is_alive, "Resources": {"CPU": 7.0}} for is_alive in (True, True, False)]
    >>> num_in_nodes({"CPU": 4}, nodes)
    2
    """
    return sum(num_fitting(resources, node["Resources"]) for node in nodes if node["Alive"])


class ActorJob:
    """The actors of a job, with the interface of :class:`runnerkit.engines.launch.spawn.Job`.

    Attributes:
        folder: folder to which the result and the failure reports of all ranks are copied.
        asked: the signal that asked the job to stop, if there was one.
    """

    def __init__(self, folder: Path, places: list[Place]) -> None:
        self.folder = folder
        self.asked: int | None = None
        self._places = places
        self._codes: dict[int, int | None] = dict.fromkeys(range(len(places)))
        self._running: dict[Any, int] = {}  # ranks, by the reference or the generator of what an actor returns
        self._has_asked = False
        self._failed_at: float | None = None

    def start(self, files: Any, *, streams: bool) -> None:
        """Send the files to each node, and let the ranks begin."""
        answers = [place.actor.meet.remote(files if place.local_rank == 0 else None) for place in self._places]
        for rank, (place, answer) in enumerate(zip(self._places, answers, strict=True)):
            place.met = self._get(answer, rank)
        for rank, place in enumerate(self._places):
            stream = place.actor.stream.options(_generator_backpressure_num_objects=_MAX_AHEAD)
            method = stream if streams else place.actor.call
            self._running[method.remote(self._variables(rank), os.getcwd())] = rank

    def _variables(self, rank: int) -> dict[str, str]:
        place, first = self._places[rank], self._places[0]
        beside = [each for each in self._places if each.node == place.node]
        gpus = [gpu for each in beside for gpu in each.met.gpus]
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(len(self._places)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": first.host,
            "MASTER_PORT": str(first.met.port),
            STORE_VARIABLE: "",  # identifies runnerkit as the launcher
            FOLDER_VARIABLE: beside[0].met.folder,
            # All GPUs of the job's processes on this node, in their order: nccl connects them directly.
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
        }

    def wait(self) -> None:
        """Wait until a process ends, for at most 0.2 s; pass a signal on."""
        import ray

        if self.asked is not None and not self._has_asked:
            self._has_asked = True
            self._signal(signal.SIGTERM, list(self._running.values()))
        for reference in ray.wait(list(self._running), timeout=_WAIT_S)[0]:
            rank = self._running.pop(reference)
            self._note(rank, self._get(reference, rank))

    def is_over(self) -> bool:
        """Return whether all processes have ended successfully.

        Raises:
            Exception: what the first failing process raised.
            WorkerError: a process was killed, or its node is gone.
        """
        codes = self._codes
        running = [rank for rank, code in codes.items() if code is None]
        if not any(codes.values()):
            return not running
        if not running or is_cause_known(self.folder, codes):
            raise cause_of_end(self.folder, codes)
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > _CAUSE_S:
            raise self._lost(running[0], "the others have lost it") from cause_of_end(self.folder, codes)
        return False

    def ask_to_stop(self, number: int) -> None:
        """Note a signal, within its handler, for :meth:`wait`: the processes save and stop by themselves."""
        self.asked = number

    def rounds(self) -> Iterator[list[Any]]:
        """Yield the list of all ranks' first values, then of their second values, until all have ended."""
        import ray

        received: list[deque[Any]] = [deque() for _ in self._places]
        while self._running or any(received):
            while any(not received[rank] for rank in self._running.values()):
                hungry = [each for each, rank in self._running.items() if len(received[rank]) < _MAX_AHEAD]
                for generator in ray.wait(hungry, num_returns=1, timeout=_WAIT_S)[0]:
                    rank = self._running[generator]
                    answer = self._get(next(generator), rank)
                    if isinstance(answer, bytes):
                        received[rank].append(answer)
                    else:
                        del self._running[generator]
                        self._note(rank, answer)
                self.is_over()
            if values := [pickling.loads(each.popleft()) for each in received if each]:
                yield values

    def end(self) -> None:
        """Let the processes that still run close their files, and delete the job's folders on their nodes."""
        import ray

        if None not in self._codes.values():
            deletions = [place.actor.close.remote() for place in self._places if place.local_rank == 0]
        else:
            self._signal(signal.SIGTERM, list(self._running.values()))
            # Not by ray.kill, which runs destructors: those of gloo crash while its threads work.
            deletions = self._signal(signal.SIGKILL, self._left(), deletes=True)
        ray.wait(deletions, num_returns=len(deletions), timeout=_DELETE_S)
        self._left()

    def _left(self) -> list[int]:
        """Return the ranks that do not end within a few seconds."""
        import ray

        ends = {
            each.completed() if isinstance(each, ray.ObjectRefGenerator) else each: rank
            for each, rank in self._running.items()
        }
        return [ends[each] for each in ray.wait(list(ends), num_returns=len(ends), timeout=_GRACE_S)[1]] if ends else []

    def _note(self, rank: int, answer: tuple[int, Files]) -> None:
        self._codes[rank], files = answer
        write_files(files, self.folder)

    def _get(self, reference: Any, rank: int) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            raise self._lost(rank, str(error)) from None

    def _lost(self, rank: int, why: str) -> WorkerError:
        return WorkerError(f"rank {rank} of {len(self._places)} was lost, on node {self._places[rank].host}: {why}")

    def _signal(self, number: int, ranks: list[int], *, deletes: bool = False) -> list[Any]:
        """Send a signal to ranks, by a task on each node, as an actor runs its methods one after another.

        Args:
            deletes: delete the folders of the job too.
        Returns:
            The references of the tasks.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        passed_on, original = PASSED_ON if self.asked else "", self.asked

        def send(pids: list[int], folder: str) -> None:
            if passed_on and os.path.isdir(folder):
                with open(os.path.join(folder, passed_on), "w") as file:
                    file.write(str(original))
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if deletes and folder:
                shutil.rmtree(folder, ignore_errors=True)

        task, sent = ray.remote(num_cpus=0, max_retries=0)(send), []  # it travels as its code, which imports no torch
        for place in self._places:
            beside = [rank for rank, each in enumerate(self._places) if each.node == place.node]
            pids = [self._places[rank].met.pid for rank in beside if rank in ranks]
            if place.local_rank == 0 and (pids or deletes):
                where = NodeAffinitySchedulingStrategy(place.node, soft=False)
                sent.append(task.options(scheduling_strategy=where).remote(pids, place.met.folder))
        return sent
