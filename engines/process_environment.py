"""Which process of a job this one is, as the launcher's environment variables tell."""

import os
import re
import zlib
from dataclasses import dataclass
from typing import Self

STORE_VARIABLE = "RUNNERKIT_STORE"  # path of the file through which processes of one machine find each other


@dataclass(frozen=True)
class ProcessEnvironment:
    """Place of this process in its job.

    Attributes:
        launcher: who started the processes: "runnerkit", "torchrun", "srun", "mpirun", "horovodrun", or "the launcher"
            that set the variables of ``torch.distributed``.
        store: file for the rendezvous, of processes on one machine.
        address, port: where rank zero (or torchrun's agent) listens; None with a store, or if the launcher names none.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    store: str | None = None
    address: str | None = None
    port: int | None = None

    @classmethod
    def read(cls) -> Self | None:
        """Read the variables of the launchers; None if nobody launched this process as one of a job.

        Raises:
            ValueError: a variable is missing or wrong, named with its value.
        """
        # The inner launcher first: torchrun or mpirun may itself have been started by Slurm.
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            return cls._of_torch()
        if "HOROVOD_RANK" in os.environ:
            return cls._of("horovodrun", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE")
        if "OMPI_COMM_WORLD_RANK" in os.environ:
            return cls._of_mpirun()
        # A batch script has SLURM_PROCID too; a step id tells what srun started. Of one task it is a plain process.
        if "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1":
            return cls._of_srun()
        return None

    @classmethod
    def _of(cls, launcher: str, rank: str, local_rank: str, world_size: str, address: str | None = None,
            port: int | None = None, store: str | None = None) -> Self:  # fmt: skip
        number, count = _integer(rank), _integer(world_size)
        port = _integer("MASTER_PORT") if "MASTER_PORT" in os.environ else port
        place = cls(launcher, number, _integer(local_rank), count, store, os.environ.get("MASTER_ADDR", address), port)
        if not 0 <= place.rank < place.world_size:
            raise ValueError(
                f"{rank}={place.rank} must be in [0, {world_size}={place.world_size}); both come from {launcher}"
            )
        return place

    @classmethod
    def _of_torch(cls) -> Self:
        store = os.environ.get(STORE_VARIABLE)
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "runnerkit" if store else "the launcher"
        place = cls._of(launcher, "RANK", "LOCAL_RANK", "WORLD_SIZE", store=store)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if store is None and name not in os.environ:
                raise ValueError(f"RANK is set but {name} is not; start with torchrun, or unset RANK and WORLD_SIZE")
        return place

    @classmethod
    def _of_mpirun(cls) -> Self:
        # On several machines they must be told where to meet, unless they meet by MPI (Horovod).
        is_one_machine = _integer("OMPI_COMM_WORLD_LOCAL_SIZE") == _integer("OMPI_COMM_WORLD_SIZE")
        port = _port_of(os.environ.get("PMIX_NAMESPACE", str(os.getppid())))
        return cls._of(
            "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
            address="127.0.0.1" if is_one_machine else None, port=port if is_one_machine else None,
        )  # fmt: skip

    @classmethod
    def _of_srun(cls) -> Self:
        hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
        if not hosts:
            raise ValueError("SLURM_STEP_ID is set but SLURM_STEP_NODELIST is not; start the script with srun")
        job = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
        return cls._of(
            "srun", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", address=first_host(hosts), port=_port_of(job)
        )


def first_host(nodelist: str) -> str:
    """Return the first name of a Slurm node list.

    Raises:
        ValueError: it is none.

    >>> first_host("rack1-node[07-12,15],gpu3"), first_host("login"), first_host("r[1-2]n[3,5]")
    ('rack1-node07', 'login', 'r1n3')
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist.strip())
    if first is None or first.group().count("[") != first.group().count("]"):
        raise ValueError(f"{nodelist!r} is no Slurm node list, such as 'node[1-4],gpu7'")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _port_of(job: str) -> int:
    """Choose a port that all processes of a job agree on, and another job most likely does not.

    Below 32768: from there on Linux gives ports to outgoing connections.
    """
    return 12000 + zlib.crc32(job.encode()) % 20000


def _integer(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.lstrip("-").isdigit():
        raise ValueError(
            f"the environment variable {name} is {value!r}; a launcher such as torchrun sets it to an integer"
        )
    return int(value)


def get_rank() -> int:
    """Rank of this process in its job, 0 if nobody launched it.

    >>> get_rank()
    0
    """
    environment = ProcessEnvironment.read()
    return environment.rank if environment is not None else 0
