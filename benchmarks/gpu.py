"""Case i: a ResNet on CIFAR-shaped data on a GPU, with AMP and channels_last, in raw PyTorch and in runnerkit."""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from runnerkit import dl

COMPILE: dict[str, dict[str, Any]] = {
    "compile": {},
    "graph": {"mode": "reduce-overhead"},
}  # graph: CUDA graphs
VARIANTS = ("plain", "prefetch", *COMPILE)
NUM_PASSES = 2


class Batches:
    """A loader that repeats one batch; the first pass is timed with warnings about host syncs, the second is profiled.

    The first quarter of each pass, which compiles and allocates memory, does not count.
    """

    def __init__(self, device: torch.device, *, num_batches: int, batch_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch_size, 3, 32, 32, generator=generator)
        batch = images, torch.randint(0, 10, (batch_size,), generator=generator)
        self.is_cuda = device.type == "cuda"
        self.batch = tuple(each.pin_memory() for each in batch) if self.is_cuda else batch
        self.device, self.num_batches = device, num_batches
        self.step_us = self.idle_share = 0.0

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        watched = self._profiled if self.step_us else self._timed
        num_warm = len(self) // 4
        yield from repeat(self.batch, num_warm)
        with watched(len(self) - num_warm):
            yield from repeat(self.batch, len(self) - num_warm)

    @contextmanager
    def _timed(self, num_steps: int) -> Iterator[None]:
        self._synchronize()
        began = time.perf_counter()
        self._warn_of_syncs("warn")
        yield
        self._warn_of_syncs("default")
        self._synchronize()
        self.step_us = 1e6 * (time.perf_counter() - began) / num_steps

    @contextmanager
    def _profiled(self, num_steps: int) -> Iterator[None]:
        activity, kind = ("CUDA", DeviceType.CUDA) if self.is_cuda else ("CPU", DeviceType.CPU)
        with profile(activities=[getattr(ProfilerActivity, activity)]) as trace:
            yield
            self._synchronize()
        spans = [(each.time_range.start, each.time_range.end) for each in trace.events() if each.device_type == kind]
        self.idle_share = idle_share(spans)

    def _synchronize(self) -> None:
        getattr(torch, self.device.type).synchronize()

    def _warn_of_syncs(self, mode: str) -> None:
        if self.is_cuda:
            torch.cuda.set_sync_debug_mode(mode)


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Compute the share of idle time between the first start and the last end.

    >>> idle_share([(0, 4), (3, 5), (9, 10)])
    0.4
    """
    first = reach = min(start for start, _ in spans)
    idle = 0.0
    for start, end in sorted(spans):
        idle += max(0.0, start - reach)
        reach = max(reach, end)
    return idle / (reach - first)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(_Residual(64) for _ in range(3)),
        nn.Sequential(nn.Conv2d(64, 128, kernel_size=3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU()),
        *(_Residual(128) for _ in range(3)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
    )


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images + self.layers(images))


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def raw(batches: Batches, variant: str) -> float:
    device = batches.device
    model = make_model().to(device, memory_format=torch.channels_last)
    optimizer, criterion, scaler = make_optimizer(model), nn.CrossEntropyLoss(), torch.amp.GradScaler(device.type)
    forward = torch.compile(model, **COMPILE[variant]) if variant in COMPILE else model
    for _ in range(NUM_PASSES):
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for features, classes in (prefetched if variant == "prefetch" else sent)(batches):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                loss = criterion(forward(features), classes)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            loss_sum += loss.detach()
        mean = loss_sum.item() / len(batches)
    return mean


def sent(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    for images, targets in batches:
        features = images.to(batches.device, memory_format=torch.channels_last, non_blocking=True)
        yield features, targets.to(batches.device, non_blocking=True)


def prefetched(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Copy each batch on a separate stream while the previous one is processed."""
    stream, ahead = torch.cuda.Stream(), None
    on_the_way = sent(batches)
    while True:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            batch, ahead = ahead, next(on_the_way, None)
        if batch is not None:
            yield batch
        torch.cuda.current_stream().wait_stream(stream)
        if ahead is None:
            return


def ours(batches: Batches, variant: str) -> float:
    model = make_model()
    loader: Any = dl.BatchPrefetchLoaderWrapper(batches) if variant == "prefetch" else batches
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=make_optimizer(model),
        loaders={"train": loader},
        num_epochs=NUM_PASSES,
        engine=dl.AMPEngine(
            batches.device, dtype=torch.float16, channels_last=True, compile=COMPILE.get(variant, False)
        ),
        loggers={"console": None},
    )
    return runner.epoch_metrics["train"]["loss"]


def main() -> None:
    """Train in raw PyTorch or with runnerkit; count the warnings about host syncs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=("raw", "ours"))
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-batches", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512)
    options = parser.parse_args()
    batches = Batches(torch.device(options.device), num_batches=options.num_batches, batch_size=options.batch_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = {"raw": raw, "ours": ours}[options.who](batches, options.variant)
    num_syncs = sum("called a synchronizing CUDA operation" in str(each.message) for each in caught)
    figures = {
        "step_us": batches.step_us,
        "syncs": num_syncs / (len(batches) - len(batches) // 4),
        "idle_percent": 100 * batches.idle_share,
    }
    print(json.dumps({**figures, "same": {"loss": loss}}))


if __name__ == "__main__":
    main()
