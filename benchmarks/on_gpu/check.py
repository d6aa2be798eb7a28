"""The vocabulary of all checks: the setting they run in, their result, and why they skip or fail."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"

Figures = dict[str, Any]  # numbers, booleans and strings by their heading in the report
Status = Literal["passed", "failed", "skipped", "not run"]


@dataclass(frozen=True)
class Setting:
    """The device of a run, on which the sizes of its checks depend.

    Attributes:
        device_type: "cuda", or "cpu" for a dry run at tiny sizes.
    """

    device_type: Literal["cuda", "cpu"]

    @property
    def is_gpu(self) -> bool:
        return self.device_type == "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type)

    @property
    def num_devices(self) -> int:
        """Number of processes of a distributed check: one per GPU, or 2 on a CPU."""
        return torch.cuda.device_count() if self.is_gpu else 2

    def size(self, *, gpu: int, cpu: int) -> int:
        """Return the size for the device of this run."""
        return gpu if self.is_gpu else cpu

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def require_gpu(self, reason: str) -> None:
        """Raise Skipped with the reason unless this run is on a GPU."""
        if not self.is_gpu:
            raise Skipped(f"needs CUDA: {reason}")


@dataclass(frozen=True)
class Check:
    """A check of a part, which runs in a process that may crash or hang without ending the others.

    Attributes:
        run: called in the process of the check; returns figures, or raises Skipped, Failed or any other exception.
        limit_s: seconds until the process is killed.
        is_timed: whether other checks could disturb its figures; then it runs alone.
    """

    name: str
    run: Callable[[Setting], Figures]
    limit_s: float = 90
    is_timed: bool = False


@dataclass
class Outcome:
    """The result of a check, as the report shows it.

    Attributes:
        reason: why it was skipped, failed or did not run.
        last_lines: the end of the output of a failed check.
    """

    part: str
    name: str
    status: Status
    reason: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0
    last_lines: list[str] = field(default_factory=list)


class Skipped(Exception):
    """Raised by a check that this machine cannot run, with the reason."""


class Failed(Exception):
    """Raised by a check whose figures are wrong.

    Args:
        reason: what was expected and what was found.
        figures: measured so far, for the report.
    """

    def __init__(self, reason: str, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.figures = figures or {}


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Use deterministic algorithms and full float32 precision; enter before the first CUDA operation of a process."""
    workspace = os.environ.get(_WORKSPACE)
    os.environ[_WORKSPACE] = ":4096:8"  # read when cuBLAS starts; deterministic algorithms require it
    cudnn, allow_tf32 = torch.backends.cudnn, torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True)
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        cudnn.allow_tf32 = allow_tf32
        del os.environ[_WORKSPACE]
        if workspace is not None:
            os.environ[_WORKSPACE] = workspace
