"""One short run of each kind, with nothing but runnerkit and its requirements, for a Python and a torch.

``python -m tests.smoke`` prints a line for each part, and exits with 1 if a part failed. Classes and functions of this
script are in ``__main__``, as in a user's script.
"""

import faulthandler
import multiprocessing
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

from runnerkit import dl
from tests.interrupt import Interrupt
from tests.tiny import classification, loader, mlp, sgd, train, train_by_hand, weights

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 48, 8, 2
LIMIT_S = 800
TOLERANCE = {"atol": 1e-6, "rtol": 0.0}  # of another order of additions


class Stream(IterableDataset):
    """The samples of the data set as a stream, which every worker reads whole."""

    def __iter__(self):
        return iter(classification(NUM_SAMPLES))


def trained(*, data=None, num_processes=1, **options):
    """Train a new model; return its weights."""
    loaders = {"train": loader(NUM_SAMPLES, BATCH_SIZE // num_processes) if data is None else data}
    return weights(train(loaders=loaders, num_epochs=NUM_EPOCHS, loggers={"tensorboard": None}, **options).model)


def by_hand(**options):
    """Train the same model with a hand-written loop; return its weights."""
    model = mlp()
    train_by_hand(model, sgd(model), loader(NUM_SAMPLES, BATCH_SIZE), num_epochs=NUM_EPOCHS, **options)
    return weights(model)


def one_process():
    assert torch.equal(trained(engine=dl.CPUEngine()), by_hand())


def two_processes():
    engine = dl.DistributedDataParallelEngine(num_processes=2, device="cpu")
    torch.testing.assert_close(trained(engine=engine, num_processes=2), by_hand(), **TOLERANCE)


def two_processes_sharded():
    engine = dl.FullyShardedDataParallelEngine(num_processes=2, device="cpu")
    torch.testing.assert_close(trained(engine=engine, num_processes=2), by_hand(), **TOLERANCE)


def mixed_precision():
    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    assert torch.equal(trained(engine=dl.CPUEngine(precision=dl.AMP(torch.bfloat16))), by_hand(autocast=autocast))


def compiled():
    assert torch.allclose(trained(engine=dl.CPUEngine(compile={"backend": "aot_eager"})), by_hand(), **TOLERANCE)


def resumed(*, num_processes=1, **options):
    """An interrupted run ends with the weights of one that was not interrupted."""
    whole = trained(num_processes=num_processes, **options)
    with tempfile.TemporaryDirectory() as folder:
        options = {**options, "num_processes": num_processes, "logdir": folder, "resume": "auto"}

        def checkpoints():
            return dl.CheckpointCallback(Path(folder, "checkpoints"), content="runner", every_steps=1)

        try:
            trained(callbacks=[checkpoints(), Interrupt(NUM_SAMPLES // BATCH_SIZE + 2)], **options)
        except KeyboardInterrupt:
            assert torch.equal(trained(callbacks=[checkpoints()], **options), whole)
        else:
            raise AssertionError("the run was not interrupted")


def resume():
    resumed(engine=dl.CPUEngine())


def resume_of_two_processes():
    resumed(engine=dl.DistributedDataParallelEngine(num_processes=2, device="cpu"), num_processes=2)


def stream_of_two_processes():
    data = DataLoader(Stream(), batch_size=BATCH_SIZE // 2, num_workers=2)
    engine = dl.DistributedDataParallelEngine(num_processes=2, device="cpu")
    torch.testing.assert_close(trained(engine=engine, num_processes=2, data=data), by_hand(), **TOLERANCE)


def workers(method):
    """Workers give the batches of the data set; all have ended once the loader is deleted."""
    data = loader(NUM_SAMPLES, BATCH_SIZE, num_workers=2, multiprocessing_context=method, persistent_workers=True)
    assert torch.equal(trained(engine=dl.CPUEngine(), data=data), by_hand())
    del data
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


def workers_by_default():
    workers(None)


def workers_by_fork():
    workers("fork")


def workers_by_spawn():
    workers("spawn")


def workers_by_forkserver():
    workers("forkserver")


PARTS = [
    one_process, two_processes, two_processes_sharded, mixed_precision, compiled, resume, resume_of_two_processes,
    stream_of_two_processes, workers_by_default, workers_by_fork, workers_by_spawn, workers_by_forkserver,
]  # fmt: skip


def main():
    """Run all parts; return the number of failed ones."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    num_failed = 0
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}")
    for part in PARTS:
        began = time.monotonic()
        try:
            part()
            result = "passed"
        except Exception:
            num_failed += 1
            result = f"FAILED\n{traceback.format_exc()}"
        print(f"{part.__name__}: {result} ({time.monotonic() - began:.1f} s)", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main() > 0)
