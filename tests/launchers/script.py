"""The user's script in the launcher tests: train.py LOGDIR NUM_EPOCHS HELD_EPOCH TIMEOUT_S."""

import os
import sys
import time
from pathlib import Path

import torch

from runnerkit import dl
from tests.tiny import loader, mlp, train


def say(runner, words):
    """Write one line in one call: several processes share the output."""
    engine = runner.engine
    os.write(1, f"rank {engine.rank} of {engine.world_size} on {os.uname().nodename} {words}\n".encode())


class Hold(dl.Callback):
    """A callback that waits within an epoch until a file `go` exists, so that a test can act on the job meanwhile."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_batch_end(self, runner):
        if runner.epoch_step == self.epoch and runner.loader_key == "train" and runner.loader_batch_step == 2:
            say(runner, f"holds with pid {os.getpid()}")
            while not Path("go").exists():
                time.sleep(0.05)
            if os.environ.get("FAILS_ON") == os.uname().nodename:
                raise LookupError("on one host")


logdir, num_epochs, held_epoch, timeout_s = sys.argv[1:]
model = mlp()
data = {"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)}
engine = dl.DistributedDataParallelEngine(device="cpu", timeout_s=float(timeout_s))
options = {"num_epochs": int(num_epochs), "logdir": logdir, "resume": "auto", "loggers": {"tensorboard": None}}
runner = train(model, loaders=data, callbacks=[Hold(int(held_epoch))], engine=engine, **options)
assert runner.model is model
assert runner.epoch_metrics["valid"]["loss"] > 0
torch.save(model.state_dict(), f"{logdir}/rank{runner.engine.rank}.pth")
say(runner, "is done")
