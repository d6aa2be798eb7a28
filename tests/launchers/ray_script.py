"""The user's script in the tests of Ray: ray_script.py LOGDIR ENGINE NUM_EPOCHS WHAT MAX_RESTARTS [LEAST MOST].

WHAT happens once on the last rank, in the second epoch: "nothing", "raises", or "holds" until the script is asked to
stop. There are two ranks, or as many between LEAST and MOST as there is room for.
"""

import os
import sys
import time
from pathlib import Path

import torch

from runnerkit import dl
from runnerkit.loop.stop_signals import FOLDER_VARIABLE, PASSED_ON
from tests.tiny import loader, mlp, train

ENGINES = {"ddp": dl.DistributedDataParallelEngine, "fsdp": dl.FullyShardedDataParallelEngine}


class Happens(dl.Callback):
    """A callback of ``__main__``, which travels by value."""

    def on_experiment_start(self, runner):
        print(f"starts with pid {os.getpid()}", flush=True)

    def on_epoch_start(self, runner):
        print(f"begins epoch {runner.epoch_step}", flush=True)

    def on_batch_end(self, runner):
        is_there = runner.epoch_step == 2 and runner.loader_key == "train" and runner.loader_batch_step == 2
        is_last = runner.engine.rank == runner.engine.num_processes - 1
        if not is_there or not is_last or Path(logdir, "happened").exists():
            return
        if what == "raises":
            raise LookupError("on one rank")
        if what == "holds":
            Path(logdir, "happened").touch()
            print(f"holds with pid {os.getpid()}", flush=True)
            while not Path(os.environ[FOLDER_VARIABLE], PASSED_ON).exists():
                time.sleep(0.05)
            time.sleep(1)  # the signal follows


logdir, engine, num_epochs, what, max_restarts, *bounds = sys.argv[1:]
if __name__ == "__main__":
    model = mlp()
    cluster = dl.RayLauncher(max_restarts=int(max_restarts))
    runner = train(
        model,
        engine=ENGINES[engine](tuple(map(int, bounds)) or 2, device="cpu", launcher=cluster),
        loaders={"train": loader(64, 8, shuffle=True, num_workers=1), "valid": loader(21, 8)},
        callbacks=[Happens()],
        num_epochs=int(num_epochs),
        logdir=logdir,
        resume="auto",
    )
    assert runner.model is model
    result = {
        "weights": model.state_dict(), "metrics": dict(runner.epoch_metrics), "steps": runner.batch_step,
        "num_processes": runner.engine.num_processes,
    }  # fmt: skip
    torch.save(result, Path(logdir, "result.pth"))
    time.sleep(2)  # Ray reads the lines of the ranks from files, now and then
