"""A run of a random setting by the library, and by a hand-written loop over the same global batches."""

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from runnerkit import dl
from tests import tiny
from tests.faults.fuzz_setting import FEATURES, SEED, TARGETS, Batch, Setting, network
from tests.tiny import sgd, weights

UNKNOWN = 20  # steps for which the schedule is made if it is not told their number


class Result(NamedTuple):
    """Result of a run.

    Attributes:
        told: number of steps that the schedule was made for.
        samples: samples of all steps up to each one.
    """

    weights: torch.Tensor
    rate: float
    num_steps: int
    num_samples: int
    told: int | None = None
    samples: tuple[int, ...] = ()


def schedule(optimizer: torch.optim.Optimizer, num_steps: int | None) -> LambdaLR:
    """Let the learning rate fall linearly."""
    total = num_steps or UNKNOWN
    return LambdaLR(optimizer, lambda step: 1 - 0.9 * min(1.0, step / total))


def train(
    setting: Setting, *, num_processes: int = 1, num_workers: int = 0, persistent: bool = False, **kwargs: Any
) -> Result:
    """Train with the library; every rank must call."""
    model, told = network(setting.dropout), []

    def make(optimizer: torch.optim.Optimizer, num_steps: int | None) -> LambdaLR:
        told.append(num_steps)
        return schedule(optimizer, num_steps)

    engine = dl.CPUEngine() if num_processes == 1 else dl.DistributedDataParallelEngine(num_processes, device="cpu")
    loader = setting.loader(num_processes=num_processes, num_workers=num_workers, persistent=persistent)
    valid = Setting("tensors", (7,), 3).loader(num_processes=1)
    runner = tiny.train(
        model,
        scheduler=kwargs.pop("scheduler", make),
        loaders={"train": loader, "valid": valid},
        callbacks=[dl.SchedulerCallback(interval="step"), *kwargs.pop("callbacks", ())],
        engine=engine,
        seed=SEED,
        num_epochs=setting.num_epochs,
        num_steps=setting.num_steps,
        num_samples=setting.num_samples,
        accumulation_steps=setting.accumulation,
        gradient_clip=setting.clip,
        epoch_steps=setting.epoch_steps,
        valid_every_steps=setting.valid_every_steps,
        **kwargs,
    )
    rate = runner.optimizer.param_groups[0]["lr"]
    return Result(weights(model), rate, runner.optimizer_step, runner.sample_step, told[0] if told else None)


def train_by_hand(setting: Setting, *, num_processes: int, told: int | None) -> Result:
    """Train with plain PyTorch on the same global batches, with the schedule for `told` steps."""
    torch.manual_seed(SEED)
    model = network(setting.dropout)
    optimizer = sgd(model)
    scheduler = schedule(optimizer, told)
    num_done, samples = 0, []
    for step in steps_of(setting, num_processes=num_processes):
        if step is None:
            if setting.kind != "tensors":
                torch.empty((), dtype=torch.int64).random_()  # a DataLoader's iterator draws a seed
            continue
        size = sum(map(len, step))
        optimizer.zero_grad()
        for batch in step:
            loss = nn.functional.cross_entropy(model(FEATURES[batch]), TARGETS[batch], reduction="sum")
            (loss / size).backward()
        if setting.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        scheduler.step()
        num_done += size
        samples.append(num_done)
    return Result(weights(model), scheduler.get_last_lr()[0], len(samples), num_done, told, tuple(samples))


def steps_of(setting: Setting, *, num_processes: int) -> Iterator[list[Batch] | None]:
    """Yield the global batches of each step of a run; None at the beginning of an epoch."""
    num_steps, num_samples = 0, 0
    is_cut = setting.kind in ("map", "tensors") and setting.epoch_steps is None
    for epoch in count(1):
        if setting.num_epochs is not None and epoch > setting.num_epochs:
            return
        yield None
        batches = setting.epoch(epoch, num_processes=num_processes)
        if is_cut and setting.num_samples is not None:
            batches = _first(batches, setting.num_samples - num_samples)
        for step in _groups(batches, setting.accumulation):
            yield step
            num_steps += 1
            num_samples += sum(map(len, step))
            if setting.num_steps == num_steps or num_samples >= (setting.num_samples or num_samples + 1):
                return


def _first(batches: Iterator[Batch], num_samples: int) -> Iterator[Batch]:
    """Yield batches of the first so many samples."""
    while num_samples > 0 and (batch := next(batches, None)) is not None:
        yield batch[:num_samples]
        num_samples -= len(batch)


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
