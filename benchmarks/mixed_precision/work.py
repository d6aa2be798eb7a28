"""The shared work of the mixed precision case: data, clock, peak memory and accuracy.

usage: python -m benchmarks.mixed_precision.raw WAY PRECISION      (ddp under torchrun)
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.resident import resident_mib
from examples.mixed_precision import CNN, WAYS
from runnerkit.contrib import Digits
from runnerkit.precision import computes_bf16

Batch = tuple[Tensor, Tensor]
Measured = tuple[float, float, list[float]]  # per process: mean loss, seconds, peaks in MiB
PRECISIONS = ("fp32", "amp")


@dataclass(frozen=True)
class Size:
    """The size of the work; activations, not weights, fill the memory, and the first epoch is not timed."""

    side: int
    width: int
    batch_size: int  # over all processes
    num_epochs: int

    @property
    def num_steps(self) -> int:
        return self.num_epochs * (NUM_TRAIN // self.batch_size)

    @property
    def num_warm(self) -> int:
        return self.num_steps // self.num_epochs


NUM_TRAIN = 1408  # a number of digits that makes every batch full
SIZES = {
    "cpu": Size(32, width=16, batch_size=128, num_epochs=4),
    "cuda": Size(64, width=128, batch_size=352, num_epochs=20),
}


def size_for(device: torch.device) -> Size:
    return SIZES[device.type]


def digits(device: torch.device, *, train: bool) -> Batch:
    """Load scikit-learn's digits, enlarged, as (N, 1, side, side) in [0, 1] and classes, in main memory."""
    data, side = Digits(train=train), size_for(device).side
    images = nn.functional.interpolate(data.images.unsqueeze(1) / 255, size=(side, side), mode="bilinear")
    return (images[:NUM_TRAIN], data.targets[:NUM_TRAIN]) if train else (images, data.targets)


def make_model(device: torch.device) -> CNN:
    torch.manual_seed(0)
    return CNN(size_for(device).width)


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def accuracy(model: nn.Module, device: torch.device) -> float:
    """Evaluate in fp32, independently of the training precision."""
    images, targets = digits(device, train=False)
    model.to(device).eval()
    with torch.no_grad():
        logits = torch.cat([model(part.to(device)).cpu() for part in images.split(60)])
    return (logits.argmax(dim=1) == targets).double().mean().item()


class Watch:
    """Time and peak memory of a process's steps.

    On a CPU, the time is the process's CPU time, so that other load on the machine matters little, and the peak is
    that of its resident memory above the level at the start of training. On GPUs, they are the wall-clock time and
    the memory that torch allocates.
    """

    def __init__(self, way: str, device: torch.device) -> None:
        self.device, self.size = device, size_for(device)
        self._num_steps, self._began, self.seconds = 0, 0.0, 0.0
        if device.type == "cuda":
            self._gpus = list(range(torch.cuda.device_count())) if way == "dp" else [torch.cuda.current_device()]
            for index in self._gpus:
                torch.cuda.reset_peak_memory_stats(index)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
            self._held = resident_mib("VmRSS")

    def step(self) -> None:
        """Count a step."""
        self._num_steps += 1
        if self._num_steps == self.size.num_warm:
            self._began = self._now()
        elif self._num_steps == self.size.num_steps:
            self.seconds = self._now() - self._began

    def _now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def peaks_mib(self) -> list[float]:
        """Return the peak of this process, or of each GPU under DataParallel."""
        if self.device.type == "cpu":
            return [max(0.0, resident_mib("VmHWM") - self._held)]  # the system counts some pages with a delay
        return [torch.cuda.max_memory_allocated(index) / 2**20 for index in self._gpus]


def _keep_memory() -> None:
    # Otherwise glibc returns large tensors to the system and requests them again in each step: up to half of the time.
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


@dataclass(frozen=True)
class Trained:
    """The trained model and the measurements of each process."""

    model: nn.Module
    everyones: Sequence[Measured]
    is_main_process: bool


def main(train: Callable[[str, torch.dtype | None], Trained]) -> None:
    """Train as the arguments specify; print the figures on the main process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("precision", choices=PRECISIONS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _keep_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    amp = torch.bfloat16 if computes_bf16(device) else torch.float16
    trained = train(options.way, amp if options.precision == "amp" else None)
    if not trained.is_main_process:
        return
    size = size_for(device)
    losses, seconds, peaks = zip(*trained.everyones, strict=True)
    # CPU time is the sum over all processes, wall-clock time that of the slowest.
    together = sum(seconds) if device.type == "cpu" else max(seconds)
    figures = {
        "samples_per_s": size.batch_size * (size.num_steps - size.num_warm) / together,
        "fullest_mib": max(map(max, peaks)),
        "emptiest_mib": min(map(min, peaks)),
        "accuracy_percent": 100 * accuracy(trained.model, device),
    }
    print(json.dumps({**figures, "same": {"loss": statistics.mean(losses)}}), flush=True)
