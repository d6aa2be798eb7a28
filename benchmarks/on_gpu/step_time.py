"""Part b: the time of a step beside a hand-written loop, in turns within one process, and the idle share of the GPU."""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.on_gpu import work
from benchmarks.on_gpu.check import Check, Figures, Setting
from benchmarks.on_gpu.compare import require_same_loss, timings
from benchmarks.on_gpu.work import Batch, Work
from runnerkit import dl

NUM_WARM = 2  # turns that compile, allocate memory and record graphs
LOSS_TOLERANCE = 0.05  # relative; kernels in 16 bits are not deterministic


class Turns:
    """A loader that repeats one batch in turns, and runs the same number of steps of a hand-written loop between them.

    Every second pair starts with the loader's own turn, so that both orders occur equally often.

    Args:
        run: takes the number of steps, and trains that many in the hand-written loop.
        num_pairs: pairs of turns that are timed.

    Attributes:
        ours_us, raw_us: microseconds of a step, by pair.
        idle: share of time in which the device computes nothing, by the name of the candidate.
    """

    def __init__(
        self, batch: Batch, run: Callable[[int], None], setting: Setting, *, num_steps: int, num_pairs: int
    ) -> None:
        self.batch, self.run, self.setting = batch, run, setting
        self.num_steps, self.num_pairs = num_steps, num_pairs
        self.batch_size = len(batch[0])
        self.ours_us: list[float] = []
        self.raw_us: list[float] = []
        self.idle: dict[str, float] = {}

    def __len__(self) -> int:
        return self.num_steps * (NUM_WARM + self.num_pairs + self.setting.is_gpu)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(NUM_WARM + self.num_pairs):
            is_timed = number >= NUM_WARM
            if number % 2:
                yield from self._own_turn(is_timed=is_timed)
                self._its_turn(is_timed=is_timed)
            else:
                self._its_turn(is_timed=is_timed)
                yield from self._own_turn(is_timed=is_timed)
        if self.setting.is_gpu:
            yield from self._profiled()

    def _own_turn(self, *, is_timed: bool) -> Iterator[Batch]:
        began = self._now()
        yield from repeat(self.batch, self.num_steps)
        if is_timed:
            self.ours_us.append(1e6 * (self._now() - began) / self.num_steps)

    def _its_turn(self, *, is_timed: bool) -> None:
        began = self._now()
        self.run(self.num_steps)
        if is_timed:
            self.raw_us.append(1e6 * (self._now() - began) / self.num_steps)

    def _profiled(self) -> Iterator[Batch]:
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self.run(self.num_steps)
            self.setting.synchronize()
        self.idle["raw"] = idle_share_of(trace)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            yield from repeat(self.batch, self.num_steps)
            self.setting.synchronize()
        self.idle["runnerkit"] = idle_share_of(trace)

    def _now(self) -> float:
        self.setting.synchronize()
        return time.perf_counter()

    def figures(self) -> Figures:
        """Return the timings and the idle shares in percent."""
        num_pairs = min(len(self.ours_us), len(self.raw_us))  # a framework that fetches ahead leaves the last one open
        return {
            **timings(self.ours_us[:num_pairs], self.raw_us[:num_pairs]),
            **{f"idle % of {name}": 100 * share for name, share in self.idle.items()},
        }


def idle_share_of(trace: Any) -> float:
    """Return the idle share of the GPU in a trace of torch.profiler; NaN if it computed nothing."""
    spans = [(each.time_range.start, each.time_range.end) for each in trace.events()
             if each.device_type == DeviceType.CUDA]  # fmt: skip
    return idle_share(spans) if spans else math.nan


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


class ByHand:
    """A hand-written loop that can train any number of steps at a time."""

    def __init__(self, job: Work, batch: Batch, setting: Setting, *, compile: dict[str, Any] | None) -> None:
        memory_format = torch.channels_last if job.channels_last else torch.preserve_format
        self.job, self.batch, self.setting = job, batch, setting
        self.model = job.make_model().to(setting.device, memory_format=memory_format)
        self.optimizer = work.make_optimizer(self.model)
        self.forward = self.model if compile is None else torch.compile(self.model, **compile)
        self.loss_sum, self.num_steps = torch.zeros((), dtype=torch.float64, device=setting.device), 0
        self.model.train()

    def run(self, num_steps: int) -> None:
        """Train `num_steps` steps."""
        job, device = self.job, self.setting.device
        inputs, targets = self.batch
        memory_format = torch.channels_last if job.channels_last else torch.preserve_format
        for _ in range(num_steps):
            features = inputs.to(device, memory_format=memory_format, non_blocking=True)
            self.optimizer.zero_grad()
            with torch.autocast(device.type, dtype=job.dtype, enabled=job.dtype is not None):
                loss = nn.functional.cross_entropy(self.forward(features), targets)
            loss.backward()
            self.optimizer.step()
            self.loss_sum += loss.detach()
        self.num_steps += num_steps

    @property
    def loss(self) -> float:
        """Mean loss of all steps."""
        return self.loss_sum.item() / self.num_steps


def with_runnerkit(job: Work, turns: Turns, setting: Setting, *, compile: dict[str, Any] | None) -> float:
    """Train on the loader; return the mean loss."""
    model = job.make_model()
    options: dict[str, Any] = {"compile": False if compile is None else compile or True}
    options["channels_last"] = job.channels_last
    if job.dtype is not None:
        options["precision"] = dl.AMP(job.dtype)
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=work.make_optimizer(model),
        loaders={"train": turns},
        engine=dl.DeviceEngine(setting.device, tf32=True, cudnn_benchmark=True, **options),
        loggers={"console": None},
    )
    loss: float = runner.epoch_metrics["train"]["loss"]
    return loss


def measure(make: Callable[[Setting], Work], setting: Setting, *, compile: dict[str, Any] | None = None) -> Figures:
    """Train a hand-written loop and runnerkit in turns.

    Args:
        compile: arguments of ``torch.compile``; None does not compile.
    """
    if compile is not None and not setting.is_gpu:
        if compile:
            setting.require_gpu("CUDA graphs")
        compile = {"backend": "aot_eager"}
    job = make(setting)
    inputs, targets = job.make_batch()
    batch = (inputs.contiguous(memory_format=torch.channels_last) if job.channels_last else inputs), targets
    reference = ByHand(job, batch, setting, compile=compile)
    turns = Turns(batch, reference.run, setting, num_steps=job.num_steps, num_pairs=setting.size(gpu=10, cpu=2))
    ours = with_runnerkit(job, turns, setting, compile=compile)
    return require_same_loss(ours, reference.loss, turns.figures(), tolerance=LOSS_TOLERANCE)


WORKS = {
    "tiny MLP": work.tiny,
    "ResNet-50 bf16, channels_last": work.resnet,
    "GPT blocks bf16": work.transformer,
}


def checks(arguments: dict[str, Any] | None, name: str, *, limit_s: float) -> tuple[Check, ...]:
    """Return a check per model; `arguments` as in :func:`measure`."""
    return tuple(
        Check(f"{each}{name}", partial(measure, make, compile=arguments), limit_s=limit_s, is_timed=True)
        for each, make in WORKS.items()
    )


CHECKS = checks(None, "", limit_s=60)
