"""The same bits each time: torch told so for a run, and in words what it cannot promise."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runnerkit.engine import IEngine

logger = logging.getLogger(__name__)

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # read by cuBLAS when it is first used
_WORKSPACES = (":4096:8", ":16:8")


@contextmanager
def deterministic_algorithms(engine: IEngine) -> Iterator[None]:
    """Let torch take only algorithms that give the same bits each time, where `engine`, set up, trains.

    In the body an operation that has none raises a RuntimeError, torch's own, with the operation's name. What torch
    does not know of is warned about, once, on rank zero.
    """
    cudnn = torch.backends.cudnn
    mode, switches = torch.get_deterministic_debug_mode(), (cudnn.deterministic, cudnn.benchmark)
    if engine.is_main_process:
        for each in what_may_differ(engine):
            logger.warning("deterministic=True, and yet runs may differ: %s", each)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark = switches


def what_may_differ(engine: IEngine) -> list[str]:
    """Say what, on this engine, torch's deterministic mode does not reach, and what to do about each."""
    found = []
    workspace = os.environ.get(WORKSPACE_VARIABLE)
    if engine.device.type == "cuda" and workspace not in _WORKSPACES:
        found.append(
            f"{WORKSPACE_VARIABLE} is {workspace!r}, so matrix products may add up in another order: set it to "
            f"{_WORKSPACES[0]!r} before the script starts"
        )
    if "max-autotune" in str((engine.compile_arguments or {}).get("mode", "")):
        found.append(
            "torch.compile in mode 'max-autotune' takes the kernels that were the fastest in this run: leave mode out"
        )
    if engine.num_processes > 1 and type(engine).__name__.startswith("Horovod"):
        found.append("Horovod fuses gradients as they arrive: set HOROVOD_FUSION_THRESHOLD=0")
    if engine.device.type == "mps":
        found.append("torch knows of no deterministic algorithms on this device: use cpu=True")
    return found
