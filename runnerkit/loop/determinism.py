"""Deterministic algorithms for the duration of a run."""

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
    """Make torch use only deterministic algorithms on the device of `engine`, which must be set up.

    In the body, an operation without one raises torch's RuntimeError, which names the operation. Nondeterminism that
    torch does not detect is logged as a warning, once, on rank zero.
    """
    cudnn = torch.backends.cudnn
    mode, switches = torch.get_deterministic_debug_mode(), (cudnn.deterministic, cudnn.benchmark)
    if engine.is_main_process:
        for each in what_may_differ(engine):
            logger.warning("deterministic=True, but runs may still differ: %s", each)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark = switches


def what_may_differ(engine: IEngine) -> list[str]:
    """List what torch's deterministic mode does not cover on this engine, with a remedy for each."""
    found = []
    workspace = os.environ.get(WORKSPACE_VARIABLE)
    if engine.device.type == "cuda" and workspace not in _WORKSPACES:
        found.append(
            f"{WORKSPACE_VARIABLE} is {workspace!r}, so matrix products may sum in a different order: set it to "
            f"{_WORKSPACES[0]!r} before the script starts"
        )
    if "max-autotune" in str((engine.compile_arguments or {}).get("mode", "")):
        found.append("torch.compile in mode 'max-autotune' selects the fastest kernels in each run: leave out mode")
    found += engine.what_may_differ()
    if engine.device.type == "mps":
        found.append("torch does not provide deterministic algorithms for this device: use cpu=True")
    return found
