"""Mixed precision three ways in raw PyTorch, as guides write it."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.mixed_precision import work
from benchmarks.mixed_precision.work import Batch


def one_device(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    scaler: torch.amp.GradScaler,
) -> Iterator[Tensor]:
    """Train under autocast, or in fp32 if `dtype` is None; yield the loss after each step."""
    model.train()
    for images, targets in batches:
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss.detach()


class InAutocast(nn.Module):
    """A module that enters autocast in each replica's thread, which does not inherit the main thread's."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module, self.device_type, self.dtype = module, device.type, dtype

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None):
            return self.module(images)


def data_parallel(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], **precision: Any
) -> Iterator[Tensor]:
    """Train from one process on all GPUs; without GPUs, DataParallel calls its module directly."""
    replicated = nn.DataParallel(InAutocast(model, precision["device"], precision["dtype"]))
    return one_device(replicated, optimizer, batches, **precision)


def ddp(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], **precision: Any
) -> Iterator[Tensor]:
    """Train in each process of a group on its own batches; GPUs synchronize batch norm statistics."""
    device_ids = None
    torch.backends.cudnn.benchmark = True
    if precision["device"].type == "cuda":
        model, device_ids = nn.SyncBatchNorm.convert_sync_batchnorm(model), [precision["device"]]
    wrapped = DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=True)
    return one_device(wrapped, optimizer, batches, **precision)


RECIPES = {"one": one_device, "dp": data_parallel, "ddp": ddp}


def dealt(data: Batch, size: work.Size, *, rank: int, world_size: int) -> Iterator[Batch]:
    """Distribute each global batch among the processes; the digits are in random order."""
    for _ in range(size.num_epochs):
        for images, targets in zip(*(each.split(size.batch_size) for each in data), strict=True):
            yield images[rank::world_size], targets[rank::world_size]


def train(way: str, dtype: torch.dtype | None) -> work.Trained:
    device, rank, world_size = torch.device("cuda" if torch.cuda.is_available() else "cpu"), 0, 1
    if way == "ddp":
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if device.type == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
    model, size = work.make_model(device).to(device), work.size_for(device)
    batches = dealt(work.digits(device, train=True), size, rank=rank, world_size=world_size)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    optimizer = work.make_optimizer(model)
    loss_sum, watch = torch.zeros((), device=device), work.Watch(way, device)
    for loss in RECIPES[way](model, optimizer, batches, device=device, dtype=dtype, scaler=scaler):
        loss_sum += loss
        watch.step()
    own = (loss_sum.item() / size.num_steps, watch.seconds, watch.peaks_mib())
    everyones = [own]
    if way == "ddp":
        everyones = [own] * world_size
        dist.all_gather_object(everyones, own)
        gc.collect()  # DDP's cycles keep the group alive; if its threads run until the exit, torch aborts
        dist.destroy_process_group()
    return work.Trained(model, everyones, is_main_process=rank == 0)


if __name__ == "__main__":
    work.main(train)
