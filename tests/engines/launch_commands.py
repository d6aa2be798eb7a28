"""Commands of each launcher that start two processes of a script on this machine, without the script's path."""

import shutil
import sys

import pytest

PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
HOROVODRUN = [PYTHON, "-m", "horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2", PYTHON]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "--bind-to", "none", PYTHON]


def needs_horovod():
    """Skip the test unless Horovod is installed; return its module."""
    return pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")


def needs_mpi():
    """Skip the test unless Horovod was built with MPI and mpirun is installed."""
    if not needs_horovod().mpi_built():
        pytest.skip("Horovod was built without MPI")
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
