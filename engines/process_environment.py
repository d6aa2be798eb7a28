"""Which process of a job this one is, as the launcher's environment variables tell."""

import os
from dataclasses import dataclass
from typing import Self

STORE_VARIABLE = "RUNNERKIT_STORE"  # path of the file through which processes of one machine find each other
_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class ProcessEnvironment:
    """Place of this process in its job.

    Attributes:
        launcher: who started the processes, for messages.
        store: file for the rendezvous; None: MASTER_ADDR and MASTER_PORT say where.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    store: str | None = None

    @classmethod
    def read(cls) -> Self | None:
        """Read the variables that torchrun, and our own spawning, set; None if nobody launched this process.

        Raises:
            ValueError: a variable is missing or no number, named with its value.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return None
        rank, world_size, local_rank = (_integer(name) for name in _REQUIRED)
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK={rank} must be in [0, WORLD_SIZE={world_size}); both come from the launcher")
        store = os.environ.get(STORE_VARIABLE)
        if store is None:
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                if name not in os.environ:
                    raise ValueError(
                        f"RANK is set but {name} is not; start with torchrun, or unset RANK and WORLD_SIZE"
                    )
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "runnerkit" if store else "the launcher"
        return cls(launcher, rank, local_rank, world_size, store)


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
