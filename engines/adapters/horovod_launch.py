"""Detection of Horovod's launchers, and a rendezvous for processes started without one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runnerkit.engines.communicators.horovod import import_horovod
from runnerkit.engines.launch.network import LOOPBACK
from runnerkit.engines.process_environment import ProcessEnvironment

_TIMEOUT_S = 600
# Environment variables that identify each launcher.
_SIGN_OF = {"torchrun": "TORCHELASTIC_RUN_ID", "srun": "SLURM_STEP_ID", "init_process_group": "its process group"}


def is_launched() -> bool:
    """Return whether a launcher that Horovod supports started this process.

    Raises:
        ValueError: the launcher is unknown to Horovod, or Horovod was built without support for it.
    """
    environment = ProcessEnvironment.read()
    if environment is None:
        return False
    launcher, count = environment.launcher, environment.world_size
    if "HOROVOD_RANK" in os.environ:
        return True
    if launcher not in ("mpirun", "horovodrun"):
        raise ValueError(
            f"{launcher} started this process ({_SIGN_OF.get(launcher, 'RANK')} is set), and Horovod does not know it: "
            f"start the script by `horovodrun -np {count} python`, or use DistributedDataParallelEngine"
        )
    if not import_horovod().mpi_built():
        raise ValueError(
            f"{launcher} started this process over MPI, but this Horovod was built without it: start the script by "
            f"`horovodrun --gloo -np {count} python`, or build Horovod with MPI (see docs/horovod.md)"
        )
    return True


@contextmanager
def rendezvous(num_processes: int) -> Iterator[Callable[[int], dict[str, str]]]:
    """Serve a rendezvous for processes on this machine; yield a function from a rank to its environment variables.

    horovodrun does not start the processes: it would put two more between each of them and the caller, which hide
    how a rank ended, and may outlive it.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    from horovod.runner.util.network import get_local_intfs

    slots = get_host_assignments(parse_hosts(f"localhost:{num_processes}"), num_processes)
    with RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, False) as server:
        server.init(slots)
        common = create_run_env_vars(LOOPBACK, get_local_intfs(), server.server_port)
        # A rank's imports may take long; the calling process notices a rank that dies before it joins.
        common["HOROVOD_GLOO_TIMEOUT_SECONDS"] = os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", _TIMEOUT_S)
        thread = threading.Thread(target=server.serve_forever, name="horovod rendezvous", daemon=True)
        thread.start()
        try:
            yield lambda rank: {
                name: str(value) for name, value in {**common, **create_slot_env_vars(slots[rank])}.items()
            }
        finally:
            server.shutdown()
            thread.join()
