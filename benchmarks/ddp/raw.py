"""Cases c and d in raw PyTorch: under torchrun this is one of the processes, otherwise mp.spawn starts them."""

import gc
import os
import socket
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.ddp.work import (
    BATCH_SIZE,
    WORLD_SIZE,
    Notes,
    data,
    is_weighted,
    num_metrics_asked,
    numbers,
    report,
    width,
)
from benchmarks.steps import work


def train(rank: int, port: int | None, path: str, num_metrics: int, width: int, *, weighted: bool) -> None:
    """Train, and reduce each metric separately; under torchrun `port` is None."""
    torch.set_num_threads(1)
    where: dict[str, Any] = {}
    if port is not None:
        where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": WORLD_SIZE}
    dist.init_process_group("gloo", **where)
    notes = Notes(path)
    model = DistributedDataParallel(work.make_model(width))
    optimizer, criterion = work.make_optimizer(model), nn.CrossEntropyLoss()
    dataset = data()
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset, shuffle=False))
    notes.begin()
    sums: dict[str, Tensor] = {}
    weight_of_all: Any = 0
    for features, targets in loader:
        optimizer.zero_grad()
        logits = model(features)
        loss = criterion(logits, targets)
        weight: Any = len(targets)
        if weighted:
            weight = targets.sum()
            total = weight.double()
            sent = dist.all_reduce(total, async_op=True)  # while the backward pass runs
            (loss * weight).backward()
            sent.wait()
            weight_of_all = weight_of_all + total
            gradients = [parameter.grad for parameter in model.parameters()]
            torch._foreach_div_(gradients, total.item() / WORLD_SIZE)
        else:
            loss.backward()
        optimizer.step()
        for name, value in {"loss": loss.detach(), **numbers(logits, num_metrics=num_metrics)}.items():
            sums[name] = sums.get(name, 0) + value.double() * weight
        notes.step()
    for summed in sums.values():
        dist.all_reduce(summed)
    means = {name: summed.item() / float(weight_of_all or len(dataset)) for name, summed in sums.items()}
    if dist.get_rank() == 0:
        notes.loader_is_over()
        report(path, means["loss"])
    del model, optimizer, logits, loss
    gc.collect()  # cycles keep the group alive; if its threads run until the exit, torch aborts
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/notes.json"
        if "RANK" in os.environ:
            train(int(os.environ["RANK"]), None, path, num_metrics_asked(), width(), weighted=is_weighted())
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = partial(train, weighted=is_weighted())
        mp.spawn(job, args=(port, path, num_metrics_asked(), width()), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
