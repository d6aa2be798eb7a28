"""Part b: the time of an epoch with its data, beside a hand-written loop that loads and copies the same way."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from benchmarks.on_gpu import work
from benchmarks.on_gpu.check import Check, Figures, Setting
from benchmarks.on_gpu.compare import require_same_loss, timings
from benchmarks.on_gpu.step_time import idle_share_of
from runnerkit import dl

NUM_CLASSES = 10
LOSS_TOLERANCE = 0.2  # relative; both shuffle in their own order
Loader = Iterable[tuple[Tensor, Tensor]]


class Images(Dataset[tuple[Tensor, int]]):
    """Random images in memory, normalized one by one as data sets of files do: (3, size, size) float32, class."""

    def __init__(self, setting: Setting) -> None:
        size, number = setting.size(gpu=32, cpu=8), setting.size(gpu=10240, cpu=64)
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randint(256, (number, 3, size, size), dtype=torch.uint8, generator=generator)
        self.classes = torch.randint(NUM_CLASSES, (number,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pixels[index].float().div_(127.5).sub_(1), self.classes[index]


class Epochs(dl.Callback):
    """A callback that times epochs of training, and an epoch of a hand-written loop before or after each.

    The first pair of epochs, which starts workers, is not timed; on a GPU the last is profiled instead.

    Args:
        run: trains one epoch of the hand-written loop.
    """

    def __init__(self, run: Callable[[], None], setting: Setting, *, num_steps: int, num_pairs: int) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.run, self.setting = run, setting
        self.num_steps, self.num_pairs = num_steps, num_pairs
        self.ours_us: list[float] = []
        self.raw_us: list[float] = []
        self.idle: dict[str, float] = {}
        self.trace: Any = None
        self.began = 0.0

    @property
    def num_epochs(self) -> int:
        """Number of epochs that the run must have."""
        return 1 + self.num_pairs + self.setting.is_gpu

    def on_epoch_start(self, runner: Any) -> None:
        if runner.epoch_step % 2 == 0:
            self._its_turn(runner.epoch_step)
        self._begin(runner.epoch_step)

    def on_epoch_end(self, runner: Any) -> None:
        self._end(runner.epoch_step, self.ours_us, "runnerkit")
        if runner.epoch_step % 2 == 1:
            self._its_turn(runner.epoch_step)

    def _its_turn(self, epoch: int) -> None:
        self._begin(epoch)
        self.run()
        self._end(epoch, self.raw_us, "raw")

    def _begin(self, epoch: int) -> None:
        self.setting.synchronize()
        if epoch > 1 + self.num_pairs:
            self.trace = profile(activities=[ProfilerActivity.CUDA]).__enter__()
        self.began = time.perf_counter()

    def _end(self, epoch: int, times_us: list[float], name: str) -> None:
        self.setting.synchronize()
        if self.trace is not None:
            self.trace.__exit__(None, None, None)
            self.idle[f"idle % of {name}"] = 100 * idle_share_of(self.trace)
            self.trace = None
        elif epoch > 1:
            times_us.append(1e6 * (time.perf_counter() - self.began) / self.num_steps)


class ByHand:
    """A hand-written loop over a loader whose batches are on the device."""

    def __init__(self, loader: Loader, setting: Setting) -> None:
        self.loader, self.setting = loader, setting
        self.model = make_model(setting).to(setting.device, memory_format=torch.channels_last)
        self.optimizer = work.make_optimizer(self.model)
        self.loss = math.nan
        self.model.train()

    def run(self) -> None:
        """Train one epoch."""
        losses = torch.zeros((), dtype=torch.float64, device=self.setting.device)
        num_steps = 0
        for features, targets in self.loader:
            features = features.to(self.setting.device, memory_format=torch.channels_last)
            self.optimizer.zero_grad()
            with torch.autocast(self.setting.device_type, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(self.model(features), targets)
            loss.backward()
            self.optimizer.step()
            losses += loss.detach()
            num_steps += 1
        self.loss = losses.item() / num_steps


def make_model(setting: Setting) -> nn.Module:
    """Create a ResNet-18, or a small network for a dry run."""
    torch.manual_seed(1)
    if setting.is_gpu:
        model: nn.Module = work.torchvision_models().resnet18(num_classes=NUM_CLASSES)
        return model
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, NUM_CLASSES)
    )


class Prefetched:
    """A hand-written loader that copies the next batch on a side stream while the GPU computes."""

    def __init__(self, loader: Loader, setting: Setting) -> None:
        self.loader, self.setting = loader, setting

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.setting.is_gpu:
            yield from self.loader
            return
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        ahead: list[Tensor] = []
        for pair in self.loader:
            with torch.cuda.stream(side):
                arriving = [each.to(self.setting.device, non_blocking=True) for each in pair]
            if ahead:
                yield ahead[0], ahead[1]
            main.wait_stream(side)
            for each in arriving:
                each.record_stream(main)
            ahead = arriving
        yield ahead[0], ahead[1]


class Indexed:
    """A hand-written loader that indexes shuffled batches of tensors on the device."""

    def __init__(self, tensors: tuple[Tensor, Tensor], batch_size: int, setting: Setting) -> None:
        self.tensors = [each.to(setting.device) for each in tensors]
        self.batch_size, self.device = batch_size, setting.device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.tensors[0]), device=self.device)
        for chosen in order.split(self.batch_size):
            yield self.tensors[0][chosen], self.tensors[1][chosen]


def _batch_size(setting: Setting) -> int:
    return setting.size(gpu=128, cpu=16)  # batches of workers must fit into a small /dev/shm


def from_workers(setting: Setting) -> Figures:
    """Compare epochs whose batches come from workers and are copied ahead."""
    data = Images(setting)

    def loader() -> DataLoader[Any]:
        return DataLoader(
            data,
            batch_size=_batch_size(setting),
            shuffle=True,
            num_workers=setting.size(gpu=min(4, max(1, (os.cpu_count() or 2) // 2)), cpu=1),
            persistent_workers=True,
            pin_memory=setting.is_gpu,
        )

    return measure(dl.BatchPrefetchLoaderWrapper(loader()), Prefetched(loader(), setting), len(data), setting)


def from_tensors(setting: Setting) -> Figures:
    """Compare epochs whose batches are indexed on the device."""
    data = Images(setting)
    tensors = data.pixels.float().div_(127.5).sub_(1), torch.tensor(data.classes)
    size = _batch_size(setting)
    ours = dl.TensorLoader(*tensors, batch_size=size, shuffle=True, device=setting.device)
    return measure(ours, Indexed(tensors, size, setting), len(data), setting)


def measure(ours: Any, theirs: Loader, num_samples: int, setting: Setting) -> Figures:
    """Train epochs of both in turns on loaders that yield the same samples."""
    model = make_model(setting)
    reference = ByHand(theirs, setting)
    num_steps = math.ceil(num_samples / _batch_size(setting))
    epochs = Epochs(reference.run, setting, num_steps=num_steps, num_pairs=setting.size(gpu=4, cpu=1))
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=work.make_optimizer(model),
        loaders={"train": ours},
        num_epochs=epochs.num_epochs,
        callbacks={"epochs": epochs},
        engine=dl.AMPEngine(setting.device, dtype=torch.bfloat16, channels_last=True, cudnn_benchmark=True),
        loggers={"console": None},
    )
    figures = {**timings(epochs.ours_us, epochs.raw_us), **epochs.idle}
    return require_same_loss(runner.epoch_metrics["train"]["loss"], reference.loss, figures, tolerance=LOSS_TOLERANCE)


CHECKS = (
    Check("TensorLoader on the device", from_tensors, limit_s=60, is_timed=True),
    Check("workers, prefetched on a side stream", from_workers, limit_s=90, is_timed=True),
)
