"""Case j: time and memory to pass a large data set or model to two processes, up to their first step."""

import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from runnerkit import dl

BATCH_SIZE, LOOK_EVERY_S = 8, 0.05
# Samples, features per sample, outputs of the model: 1 GiB of data, or 512 MiB of weights.
SIZES = {"data": (4096, 65536, 2), "model": (16, 1024, 131072)}


class Watch:
    """A thread that polls the total memory of this process and its children; shared pages count once."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.peak_mib = max(self.peak_mib, sum(map(_held_mib, _processes(os.getpid()))))
            time.sleep(LOOK_EVERY_S)


def _processes(pid: int) -> list[int]:
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += _processes(int(child))
    return found


def _held_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def make_work(kind: str) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    num_samples, num_features, num_outputs = SIZES[kind]
    data = TensorDataset(torch.rand(num_samples, num_features), torch.zeros(num_samples, dtype=torch.long))
    return nn.Linear(num_features, num_outputs), data


def make_loader(data: TensorDataset, **kwargs: Any) -> DataLoader[Any]:
    """Return a loader with one batch for each of two processes; its Subset holds the whole data set."""
    return DataLoader(Subset(data, range(2 * BATCH_SIZE)), batch_size=BATCH_SIZE, **kwargs)


def report(path: str, loss: float) -> None:
    Path(path).write_text(json.dumps({"at": time.time(), "loss": loss}))


def raw(model: nn.Module, data: TensorDataset, path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(_raw_rank, args=(model, data, path, port), nprocs=2)


def _raw_rank(rank: int, model: nn.Module, data: TensorDataset, path: str, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    loader = make_loader(data)
    loader = make_loader(data, sampler=DistributedSampler(loader.dataset, shuffle=False))
    # mp.spawn also shares the weights, and both processes would update them: each needs a copy.
    own = nn.Linear(model.in_features, model.out_features)  # type: ignore[arg-type]
    own.load_state_dict(model.state_dict())
    wrapped = DistributedDataParallel(own)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for features, targets in loader:
        loss = nn.functional.cross_entropy(wrapped(features), targets)
        loss.backward()
        optimizer.step()
        if rank == 0:
            report(path, loss.item())
    dist.destroy_process_group()


class Report(dl.Callback):
    """A callback that records the first step of rank zero."""

    def __init__(self, path: str) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.path = path

    def on_step_end(self, runner: Any) -> None:
        if runner.engine.is_main_process:
            report(self.path, runner.batch_metrics["loss"].item())


def ours(model: nn.Module, data: TensorDataset, path: str) -> None:
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": make_loader(data)},
        callbacks=[Report(path)],
        loggers={"console": None},
        engine=dl.DistributedDataParallelEngine(2, device="cpu"),
    )


def main() -> None:
    """Start the processes with mp.spawn or with runnerkit."""
    candidate, kind = sys.argv[1:]
    model, data = make_work(kind)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        begin, path = time.time(), f"{folder}/note.json"
        {"raw": raw, "ours": ours}[candidate](model, data, path)
        note = json.loads(Path(path).read_text())
    figures = {"first_step_s": note["at"] - begin, "peak_mib": watch.peak_mib}
    print(json.dumps({**figures, "same": {"loss": note["loss"]}}))


if __name__ == "__main__":
    main()
