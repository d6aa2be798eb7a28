"""One rank of a job of any size, alone in its process.

usage: python -m tests.engines.simulated_rank RANK WORLD_SIZE LOGDIR

Torch's fake process group does no arithmetic and no waiting. This measures what one rank of thousands costs, its
collectives and the files it writes, but checks no numbers. Prints JSON.
"""

import json
import os
import pickle
import resource
import sys
import time
from contextlib import suppress

import torch
import torch._dynamo  # torch imports it lazily, which creates temporary files
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from runnerkit import dl
from runnerkit.engines import ddp
from runnerkit.loop import stop_signals
from tests.tiny import loader, mlp, train

NUM_STEPS, BATCH_SIZE = 3, 8
NUM_METRICS = 20  # metric callbacks besides accuracy


# The fake group's operations never complete, only the hook's below do, and buckets are laid out before it is
# registered.
ddp._lay_out_buckets = lambda model: None


class SimulatedEngine(dl.DistributedDataParallelEngine):
    """An engine that enters every collective of its base and returns what equal ranks would give."""

    def reduce(self, tensor, op="sum"):
        return super().reduce(tensor, op) * (self.num_processes if op == "sum" else 1)

    def gather_object(self, value):
        with suppress(EOFError, pickle.UnpicklingError):  # nothing was sent
            super().gather_object(value)
        return [value] * self.num_processes

    def broadcast_object(self, value):
        with suppress(EOFError, pickle.UnpicklingError):
            super().broadcast_object(value)
        return value


stop_signals._AGREE_EVERY_S = 1e9  # processes exchange signals once a second, which is not part of a step


class CountCollectives(dl.Callback):
    """A callback that counts the collectives of each part of a run, as torch's dispatcher sees them."""

    def __init__(self):
        super().__init__(order=1000)
        self.counts = {}
        self.profiler = None

    def open(self):
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.profiler.__enter__()

    def close(self, part):
        self.profiler.__exit__(None, None, None)
        events = self.profiler.key_averages()
        self.counts.setdefault(part, []).append(sum(each.count for each in events if each.key.startswith("c10d::")))
        self.profiler = None

    def on_batch_start(self, runner):
        self.open()

    def on_batch_end(self, runner):
        self.close(f"step of {runner.loader_key}")
        if runner.loader_batch_step == runner.loader_batch_len:
            self.open()

    def on_loader_end(self, runner):
        self.close(f"end of {runner.loader_key}")


def finished(state, bucket):
    """Communicate with a hook that completes at once and counts as one collective; the fake group's never completes."""
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(rank, world_size, logdir):
    written = []

    def audit(event, arguments):
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(arguments[0])
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate"):
            written.append(str(arguments[0]))

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank % 8), "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
    }  # fmt: skip
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    data = loader(NUM_STEPS * BATCH_SIZE * world_size, BATCH_SIZE)
    model, count = mlp(batch_norm=True), CountCollectives()
    memory = peak_mib()
    sys.addaudithook(audit)
    started = time.perf_counter()

    class Clock(dl.Callback):
        setup_s = None

        def on_loader_start(self, runner):
            if self.setup_s is None:
                self.setup_s, self.memory = time.perf_counter() - started, peak_mib() - memory

    clock = Clock()
    metrics = [dl.PrecisionRecallF1SupportCallback("logits", "targets", prefix=f"p{i}_") for i in range(NUM_METRICS)]
    accuracy = dl.AccuracyCallback("logits", "targets", num_classes=3)
    engine = SimulatedEngine(device="cpu", comm_hook=(None, finished))
    options = {"callbacks": [accuracy, clock, count, *metrics], "num_epochs": 2, "logdir": logdir}
    train(model, loaders={"train": data, "valid": data}, engine=engine, **options)
    facts = {
        "setup_s": clock.setup_s,
        "setup_memory_mib": clock.memory,
        "memory_mib": peak_mib() - memory,
        "collectives": count.counts,
        "written": [path for path in written if path != "/dev/null"],
    }
    os.write(1, (json.dumps(facts) + "\n").encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
