"""A process of a run on several machines: it has its own staging folder, and cannot open files in another's.

``python -m tests.storage.machine_job KIND LOGDIR NUM_EPOCHS`` needs the variables of a launcher.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runnerkit import dl, utils
from runnerkit.storage.remote.urls import STAGING
from tests import tiny
from tests.tiny import loader, mlp

MACHINES = "TEST_MACHINES"  # folder whose sub-folders are the machines' disks


def keep_to_own_disk() -> None:
    """Let opening a file of another machine raise, also in libraries."""
    disks, own = os.environ[MACHINES] + os.sep, os.environ[STAGING] + os.sep

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir", "shutil.rmtree") and isinstance(arguments[0], str):
            path = os.path.abspath(arguments[0]) + os.sep
            if path.startswith(disks) and not path.startswith(own):
                raise AssertionError(f"{path} is on another machine")

    sys.addaudithook(check)


class Weigh(dl.Callback):
    """A callback that prints the sum of the absolute weights that this process holds, after the best are loaded."""

    def __init__(self) -> None:
        super().__init__(dl.CallbackOrder.External + 1)

    def on_stage_end(self, runner: dl.IRunner) -> None:
        weights = [each.detach() for each in runner.current_run.stage.training_model.parameters()]
        own = [each.to_local() if isinstance(each, DTensor) else each for each in weights]
        print("weights", float(torch.cat([each.double().flatten() for each in own]).abs().sum()))


def train(kind: str, logdir: str | Path, num_epochs: int) -> None:
    """Train or resume.

    Args:
        kind: "ddp" or "meta" (FSDP2; no process holds the whole model).
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cpu", "timeout_s": 30}
    if kind == "meta":
        options |= {"shard_modules": [nn.Linear], "init": "meta"}
    engine_class = dl.DistributedDataParallelEngine if kind == "ddp" else dl.FullyShardedDataParallelEngine
    with utils.parameters_on_meta() if kind == "meta" else nullcontext():
        model = mlp()
    arguments = {"content": "runner", "every_steps": 2, "load_best_on_end": True, "mode": "min"}
    tiny.train(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loaders={"train": loader(48, 4, shuffle=True), "valid": loader(21, 4)},
        callbacks=[dl.CheckpointCallback(logdir, monitor="valid/loss", **arguments), Weigh()],
        loggers={"csv": dl.CSVLogger(logdir, log_batch_metrics=True), "jsonl": dl.JSONLLogger(logdir)},
        num_epochs=num_epochs,
        logdir=logdir,
        resume="auto",
        engine=engine_class(2, **options),
    )


def main() -> None:
    """Train as the arguments say."""
    kind, logdir, num_epochs = sys.argv[1:]
    if MACHINES in os.environ:
        keep_to_own_disk()
    train(kind, logdir, int(num_epochs))


if __name__ == "__main__":
    main()
