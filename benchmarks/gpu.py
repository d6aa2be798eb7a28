"""Case i: a ResNet on CIFAR-shaped data on a GPU, with AMP and channels_last: by hand, and by runnerkit."""

import argparse
import json
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from runnerkit import dl

NUM_BATCHES, NUM_WARM, BATCH_SIZE = 200, 50, 512


class Batches:
    """The same batch in pinned memory; after some steps it starts the clock and lets torch warn of host syncs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(BATCH_SIZE, 3, 32, 32, generator=generator)
        self.batch = images.pin_memory(), torch.randint(0, 10, (BATCH_SIZE,), generator=generator).pin_memory()
        self.began = self.seconds = 0.0

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Any:
        for number in range(NUM_BATCHES):
            if number == NUM_WARM:
                torch.cuda.synchronize()
                self.began = time.perf_counter()
                torch.cuda.set_sync_debug_mode("warn")
            yield self.batch
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.began


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


def raw(batches: Batches, *, compiled: bool) -> float:
    model = make_model().to("cuda", memory_format=torch.channels_last)
    optimizer, criterion, scaler = make_optimizer(model), nn.CrossEntropyLoss(), torch.amp.GradScaler("cuda")
    forward = torch.compile(model) if compiled else model
    loss_sum = torch.zeros((), dtype=torch.float64, device="cuda")
    for images, targets in batches:
        features = images.to("cuda", memory_format=torch.channels_last, non_blocking=True)
        classes = targets.to("cuda", non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(forward(features), classes)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_sum += loss.detach()
    return loss_sum.item() / NUM_BATCHES


def ours(batches: Batches, *, compiled: bool) -> float:
    model = make_model()
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=make_optimizer(model),
        loaders={"train": batches},
        engine=dl.AMPEngine(dtype=torch.float16, channels_last=True, compile=compiled),
        loggers={"console": None},
    )
    return runner.epoch_metrics["train"]["loss"]


def main() -> None:
    """Train by hand or by runnerkit; count the warnings of host syncs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=("raw", "ours"))
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    batches = Batches()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = {"raw": raw, "ours": ours}[options.who](batches, compiled=options.compile)
    num_syncs = sum("called a synchronizing CUDA operation" in str(each.message) for each in caught)
    num_steps = NUM_BATCHES - NUM_WARM
    figures = {"step_us": 1e6 * batches.seconds / num_steps, "syncs": num_syncs / num_steps}
    print(json.dumps({**figures, "same": {"loss": loss}}))


if __name__ == "__main__":
    main()
