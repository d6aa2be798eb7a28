"""Versions and hardware of a run, for `environment.json` and bug reports."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

import torch

from runnerkit.engine import IEngine
from runnerkit.support.accelerator import gpu_names
from runnerkit.support.git_state import describe_commit
from runnerkit.support.redaction import redacted_command
from runnerkit.version import __version__

_PACKAGES = ("numpy", "torchvision", "torchmetrics", "tensorboard", "pandas", "horovod", "apex")


def describe_environment(engine: IEngine | None = None, *, seed: int | None = None) -> dict[str, Any]:
    """Collect versions, hardware, git commit, `seed` and, of an `engine` that is set up, its device and processes.

    For JSON; credentials in the command are left out.

    >>> describe_environment()["versions"]["torch"] == torch.__version__
    True
    """
    versions = {"runnerkit": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    facts: dict[str, Any] = {
        "versions": versions,
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "gpus": gpu_names(),
        "command": redacted_command(sys.argv),
    }
    if commit := describe_commit():
        facts["git"] = commit
    if engine is not None:
        facts["engine"] = {
            "name": type(engine).__name__,
            "precision": type(engine.precision).__name__,
            "device": str(engine.device),
            "num_processes": engine.num_processes,
        }
    if seed is not None:
        facts["seed"] = seed
    return facts
