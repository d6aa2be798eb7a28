"""The user's script in the tests of launchers: train.py LOGDIR NUM_EPOCHS [SECONDS_PER_STEP [TIMEOUT_S]]."""

import os
import sys
import time

import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, sgd


def say(words):
    """Write one line at once: several processes share the output."""
    os.write(1, f"{words}\n".encode())


class Slowly(dl.Callback):
    """Make an epoch long enough to do something to the job within it."""

    def __init__(self, seconds_per_step):
        super().__init__()
        self.seconds_per_step = seconds_per_step

    def on_batch_end(self, runner):
        time.sleep(self.seconds_per_step)

    def on_epoch_end(self, runner):
        say(f"rank {runner.engine.rank} of {runner.engine.world_size} pid {os.getpid()} ends epoch {runner.epoch_step}")


logdir, num_epochs, seconds_per_step, timeout_s = (*sys.argv[1:], "0", "60")[:4] if len(sys.argv) == 3 else sys.argv[1:]
model = mlp()
runner = dl.SupervisedRunner().train(
    model=model,
    criterion=nn.CrossEntropyLoss(),
    optimizer=sgd(model),
    loaders={"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)},
    callbacks=[Slowly(float(seconds_per_step))],
    num_epochs=int(num_epochs),
    logdir=logdir,
    resume="auto",
    loggers={"console": None, "tensorboard": None},
    engine=dl.DistributedDataParallelEngine(device="cpu", timeout_s=float(timeout_s)),
)
assert runner.model is model
assert runner.epoch_metrics["valid"]["loss"] > 0
torch.save(model.state_dict(), f"{logdir}/rank{runner.engine.rank}.pth")
say(f"rank {runner.engine.rank} of {runner.engine.world_size} is done")
