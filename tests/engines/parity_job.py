"""The job that every launcher runs for the parity law: the same training with one engine after another.

usage: python -m tests.engines.parity_job FOLDER CASE...      (also under torchrun, srun, mpirun, horovodrun)

FOLDER/CASE gets the logs, and rank zero's weights and metrics as result.pth.
"""

import faulthandler
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from runnerkit import dl
from runnerkit.engine import IEngine
from tests import tiny
from tests.tiny import loader, mlp, sgd

NUM_SAMPLES, NUM_VALID, NUM_EPOCHS, GLOBAL_BATCH = 160, 21, 2, 16
HANGS_AFTER_S = 500  # a job takes half a minute


@dataclass(frozen=True)
class Case:
    """An engine and a precision covered by the law.

    Attributes:
        launchers: the launchers that start it.
        dtype: autocast's dtype in the hand-written loop; None is fp32.
        scaled: whether that loop has a gradient scaler.
        tolerance: absolute tolerance of the weights, and its reason.
    """

    make: Callable[[], IEngine]
    launchers: tuple[str, ...]
    tolerance: tuple[float, str]
    dtype: torch.dtype | None = None
    scaled: bool = False

    @property
    def num_processes(self) -> int:
        """Number of processes per job."""
        return 1 if self.launchers == ALONE else 2


ALONE = ("python",)
TORCH = ("python", "notebook", "torchrun", "srun", "mpirun")
HOROVOD = ("python", "notebook", "horovodrun", "mpirun")

_EXACT = (0.0, "bit for bit")
_SUMS = (1e-6, "the order of float sums")
_BF16 = (2e-3, "bf16 rounds two halves differently from the whole")
_FP16 = (5e-4, "fp16 rounds two halves differently from the whole")
BF16, FP16 = torch.bfloat16, torch.float16

CASES = {
    "CPUEngine": Case(dl.CPUEngine, ALONE, _EXACT),
    "DeviceEngine": Case(lambda: dl.DeviceEngine("cpu"), ALONE, _EXACT),
    "AMPEngine bf16": Case(lambda: dl.AMPEngine("cpu", dtype=BF16), ALONE, _EXACT, BF16),
    "AMPEngine fp16": Case(lambda: dl.AMPEngine("cpu", dtype=FP16), ALONE, _EXACT, FP16, scaled=True),
    "DataParallelEngine": Case(lambda: dl.DataParallelEngine("cpu"), ALONE, _EXACT),
    "DataParallelAMPEngine bf16": Case(lambda: dl.DataParallelAMPEngine("cpu", dtype=BF16), ALONE, _EXACT, BF16),
    "DataParallelAMPEngine fp16": Case(
        lambda: dl.DataParallelAMPEngine("cpu", dtype=FP16), ALONE, _EXACT, FP16, scaled=True
    ),
    "DistributedDataParallelEngine": Case(lambda: dl.DistributedDataParallelEngine(2, device="cpu"), TORCH, _SUMS),
    "DistributedDataParallelAMPEngine bf16": Case(
        lambda: dl.DistributedDataParallelAMPEngine(2, device="cpu", dtype=BF16), TORCH, _BF16, BF16
    ),
    "DistributedDataParallelAMPEngine fp16": Case(
        lambda: dl.DistributedDataParallelAMPEngine(2, device="cpu", dtype=FP16), TORCH, _FP16, FP16, scaled=True
    ),
    "FullyShardedDataParallelEngine": Case(lambda: dl.FullyShardedDataParallelEngine(2, device="cpu"), TORCH, _SUMS),
    "FullyShardedDataParallelEngine compute_dtype=bf16": Case(
        lambda: dl.FullyShardedDataParallelEngine(2, device="cpu", compute_dtype=BF16), TORCH, _BF16, BF16
    ),
    "FullyShardedDataParallelAMPEngine bf16": Case(
        lambda: dl.FullyShardedDataParallelAMPEngine(2, device="cpu", dtype=BF16), TORCH, _BF16, BF16
    ),
    "FullyShardedDataParallelAMPEngine fp16": Case(
        lambda: dl.FullyShardedDataParallelAMPEngine(2, device="cpu", dtype=FP16), TORCH, _FP16, FP16, scaled=True
    ),
    "HorovodEngine": Case(lambda: dl.HorovodEngine(2, device="cpu"), HOROVOD, _SUMS),
    "HorovodAMPEngine bf16": Case(lambda: dl.HorovodAMPEngine(2, device="cpu", dtype=BF16), HOROVOD, _BF16, BF16),
    "HorovodAMPEngine fp16": Case(
        lambda: dl.HorovodAMPEngine(2, device="cpu", dtype=FP16), HOROVOD, _FP16, FP16, scaled=True
    ),
    # The stand-in's casts do nothing on a CPU, so this tests the scaler between Horovod and the step.
    "HorovodAPEXEngine, a stand-in for Apex": Case(
        lambda: dl.HorovodAPEXEngine(2, device="cpu", opt_level="O1"), HOROVOD, _SUMS
    ),
}


ONE_PROCESS = {None: "CPUEngine", BF16: "AMPEngine bf16", FP16: "AMPEngine fp16"}  # cases whose logs are the reference


def logdir_of(case: str, folder: Path) -> Path:
    """Return the folder of a case's logs."""
    return folder / case.replace(" ", "_")


def train(case: str, folder: Path) -> None:
    """Train as `case` specifies; rank zero saves the results."""
    logdir = logdir_of(case, folder)
    model = mlp(dropout=0.0)
    batch_size = GLOBAL_BATCH // CASES[case].num_processes
    data = {"train": loader(NUM_SAMPLES, batch_size), "valid": loader(NUM_VALID, batch_size, seed=1)}
    metric = dl.AccuracyCallback("logits", "targets", topk=(1, 2))
    options = {"optimizer": sgd(model, lr=0.05), "loaders": data, "callbacks": [metric], "num_epochs": NUM_EPOCHS}
    runner = tiny.train(model, engine=CASES[case].make(), logdir=logdir, **options)
    if runner.engine.rank == 0:
        torch.save({"weights": model.state_dict(), "metrics": runner.epoch_metrics}, logdir / "result.pth")


def main(folder: str, *cases: str) -> None:
    """Train every case; a process that hangs prints its traceback and exits."""
    # A notebook replaces sys.stderr by an object without a file descriptor.
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True, file=sys.__stderr__)
    for case in cases:
        train(case, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
