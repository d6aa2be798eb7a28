"""Rank, world size and rendezvous of this process, read from its launcher's environment variables."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist

from runnerkit.engines.launch.network import LOOPBACK

# Over MPI, horovodrun does not set its own variables: these are the options that it passes to Open MPI's mpirun.
_HOROVODRUN_OVER_MPI = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib", "OMPI_MCA_orte_tag_output": "1"}
STORE_VARIABLE = "RUNNERKIT_STORE"  # path of the file through which processes of one machine find each other
_LARGEST_PORT = 65535
_FIRST_PORT, _NUM_PORTS, _NUM_CANDIDATES = 12_000, 16_384, 5  # of ports derived from a job


@dataclass(frozen=True)
class ProcessEnvironment:
    """Place of this process in its job.

    Attributes:
        launcher: name of the launcher: "runnerkit", "torchrun", "srun", "mpirun", "horovodrun", "the launcher" that
            set the variables of ``torch.distributed``, or "init_process_group" if the user called it.
        store: rendezvous file for processes on one machine.
        address: machine of rank zero (or of torchrun's agent); None with a store, or if the launcher sets none.
        ports: where rank zero listens, on the first that is free: several if they are derived from the job, one if it
            was set; empty with a store, or if nobody sets any.
        is_store_shared: whether torchrun's agent already listens there, with a store that outlives its workers.
        job: name by which the launcher tells this job from others; empty if it gives none.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    store: str | None = None
    address: str | None = None
    ports: tuple[int, ...] = ()
    is_store_shared: bool = False
    job: str = ""

    @property
    def is_on_one_machine(self) -> bool:
        """Return whether all processes of the job are known to run on this machine."""
        if self.store is not None or self.address in ("localhost", LOOPBACK, "::1"):
            return True
        if self.launcher == "srun":
            return self._is_step_on_one_machine()
        if self.launcher in ("mpirun", "horovodrun"):
            return self._is_mpirun_on_one_machine()
        # Variables such as RANK may have been set from those of an outer launcher, whose job is then as large.
        of_torch = os.environ.get("LOCAL_WORLD_SIZE") == str(self.world_size)
        return of_torch or self._is_mpirun_on_one_machine() or self._is_step_on_one_machine()

    def _is_mpirun_on_one_machine(self) -> bool:
        counts = {os.environ.get(f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "LOCAL_SIZE")}
        return counts == {str(self.world_size)}

    def _is_step_on_one_machine(self) -> bool:
        is_whole_job = os.environ.get(_num_slurm_tasks()) == str(self.world_size)
        return is_whole_job and os.environ.get("SLURM_STEP_NUM_NODES") == "1"

    @classmethod
    def read(cls) -> Self | None:
        """Read the variables of the launchers; None if no launcher started this process.

        Raises:
            ValueError: a variable is missing or wrong, named with its value and what was expected.
        """
        # The inner launcher first: torchrun or mpirun may itself have been started by Slurm.
        has_group = dist.is_available() and dist.is_initialized()
        if "RANK" in os.environ or ("WORLD_SIZE" in os.environ and not has_group):
            return cls._of_torch()
        if "HOROVOD_RANK" in os.environ:
            return cls._of("horovodrun", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE")
        if "OMPI_COMM_WORLD_RANK" in os.environ:
            return cls._of_mpirun()
        # A batch script or salloc's shell has SLURM_PROCID too: only a step with several tasks counts as a job.
        if "SLURM_STEP_ID" in os.environ and os.environ.get(_num_slurm_tasks(), "1") != "1":
            return cls._of_srun()
        return cls._of_group() if has_group else None

    @classmethod
    def _of(cls, launcher: str, rank: str, local_rank: str, world_size: str, address: str | None = None,
            ports: tuple[int, ...] = (), **more: Any) -> Self:  # fmt: skip
        """Read the named variables; `more` is passed to the constructor."""
        number, count, local_number = _integer(rank), _integer(world_size), _integer(local_rank)
        address = os.environ.get("MASTER_ADDR", address)
        if address is not None and not address.strip():
            raise ValueError(f"MASTER_ADDR is {address!r}; expected the host name or IP address of rank 0's machine")
        if "MASTER_PORT" in os.environ:
            ports = (_integer("MASTER_PORT"),)
            if not 0 < ports[0] <= _LARGEST_PORT:
                raise ValueError(
                    f"MASTER_PORT is {ports[0]}; expected a free port of rank 0's machine, 1 to {_LARGEST_PORT}"
                )
        for name, value in {rank: number, local_rank: local_number}.items():
            if not 0 <= value < count:
                raise ValueError(
                    f"{name}={value} must be in [0, {world_size}), and {world_size}={count}; {launcher} sets both"
                )
        return cls(launcher, number, local_number, count, address=address, ports=ports, **more)

    @classmethod
    def _of_torch(cls) -> Self:
        # The path of a surrounding runnerkit job's file does not apply to processes of torchrun.
        store = None if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get(STORE_VARIABLE)
        launcher = "the launcher" if store is None else "runnerkit"
        is_store_shared = False
        if "TORCHELASTIC_RUN_ID" in os.environ:
            launcher = "torchrun"
            is_store_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True"
        place = cls._of(
            launcher, "RANK", "LOCAL_RANK", "WORLD_SIZE", store=store or None, is_store_shared=is_store_shared
        )
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not store and name not in os.environ:
                raise ValueError(
                    f"RANK is {os.environ['RANK']!r} but {name} is not set; expected where rank 0 listens: start with "
                    "torchrun, which sets it, or unset RANK and WORLD_SIZE to run a single process"
                )
        if launcher == "torchrun" and not is_store_shared:
            # torchrun only found that this port was free: another program may have taken it since.
            job = f"{os.environ['TORCHELASTIC_RUN_ID']} at port {place.ports[0]}"
            place = replace(place, ports=(*place.ports, *_ports_of(job)), job=job)
        return place

    @classmethod
    def _of_group(cls) -> Self:
        """Read the rank passed to ``init_process_group``; the local rank is guessed unless LOCAL_RANK is set."""
        rank, num_gpus = dist.get_rank(), torch.cuda.device_count()
        local_rank = rank % num_gpus if num_gpus else rank
        if "LOCAL_RANK" in os.environ:
            local_rank = _integer("LOCAL_RANK")
        return cls("init_process_group", rank, local_rank, dist.get_world_size())

    @classmethod
    def _of_mpirun(cls) -> Self:
        # On several machines the user must set the address, except with Horovod, which connects by MPI.
        is_one_machine = _integer("OMPI_COMM_WORLD_LOCAL_SIZE") == _integer("OMPI_COMM_WORLD_SIZE")
        job = os.environ.get("PMIX_NAMESPACE", str(os.getppid()) if is_one_machine else "")
        is_horovodrun = all(os.environ.get(name) == value for name, value in _HOROVODRUN_OVER_MPI.items())
        return cls._of(
            "horovodrun" if is_horovodrun else "mpirun",
            "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
            address=LOOPBACK if is_one_machine else None, ports=_ports_of(job) if job else (), job=job,
        )  # fmt: skip

    @classmethod
    def _of_srun(cls) -> Self:
        name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in os.environ else "SLURM_JOB_NODELIST"
        if name not in os.environ:
            raise ValueError(
                f"SLURM_STEP_ID is {os.environ['SLURM_STEP_ID']!r} but SLURM_STEP_NODELIST is not set; expected the "
                "step's hosts, such as 'node[1-4]': start the script with srun"
            )
        # A requeued job keeps its number, but should not reuse its previous port.
        job = ".".join(os.environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
        try:
            host = first_host(os.environ[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
        return cls._of("srun", "SLURM_PROCID", "SLURM_LOCALID", _num_slurm_tasks(), address=host,
                       ports=_ports_of(job), job=f"{cluster} {job}".strip())  # fmt: skip


def describe_launcher() -> dict[str, Any]:
    """Describe the launcher of this process and its rank in the job, or what is wrong with its environment.

    >>> describe_launcher()
    {'name': 'plain python'}
    """
    try:
        place = ProcessEnvironment.read()
    except ValueError as error:
        return {"error": str(error)}
    if place is None:
        return {"name": "plain python"}
    facts = {
        "name": place.launcher,
        "rank": place.rank,
        "local_rank": place.local_rank,
        "world_size": place.world_size,
        "address": place.address,
        "port": place.ports[0] if place.address and place.ports else None,
        "store": place.store,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _num_slurm_tasks() -> str:
    """Return the variable that holds the step's number of tasks; SLURM_NTASKS may be that of the whole allocation."""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"


def first_host(nodelist: str) -> str:
    """Return the first name of a Slurm node list.

    Raises:
        ValueError: `nodelist` is not a Slurm node list.

    >>> first_host("rack1-node[07-12,15],gpu3"), first_host("login"), first_host("r[1-2]n[3,5]")
    ('rack1-node07', 'login', 'r1n3')
    """
    first = re.fullmatch(r"((?:[^,\[\]]|\[[^,\[\]][^\[\]]*\])+)(?:,.*)?", nodelist.strip())
    if first is None:
        raise ValueError(f"{nodelist!r} is not a Slurm node list; expected one such as 'node[1-4],gpu7'")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group(1))


def _ports_of(job: str) -> tuple[int, ...]:
    """Derive ports that all processes of a job agree on and that most likely differ from another job's.

    They are below 32768, where Linux starts to assign ports to outgoing connections.
    """
    start, step = divmod(zlib.crc32(job.encode()), _NUM_PORTS)
    # The step is odd and smaller than a power of two of ports, so that no port comes twice.
    return tuple(_FIRST_PORT + (start + number * (2 * step + 1)) % _NUM_PORTS for number in range(_NUM_CANDIDATES))


def _integer(name: str) -> int:
    value = os.environ.get(name)
    if value is None or re.fullmatch(r"-?\d+", value, flags=re.ASCII) is None:
        found = "not set" if value is None else repr(value)
        raise ValueError(
            f"the environment variable {name} is {found}; expected an integer, which {_setter_of(name)} sets"
        )
    return int(value)


def _setter_of(name: str) -> str:
    setters = {"SLURM_": "Slurm's srun", "OMPI_": "mpirun", "HOROVOD_": "horovodrun"}
    return next(
        (setter for prefix, setter in setters.items() if name.startswith(prefix)), "a launcher such as torchrun"
    )


def get_rank() -> int:
    """Return the rank of this process in its job, 0 without a launcher.

    >>> get_rank()
    0
    """
    environment = ProcessEnvironment.read()
    return environment.rank if environment is not None else 0
