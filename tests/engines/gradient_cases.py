"""Trainings whose batches weigh differently, and hand-written ones over global batches."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests import tiny
from tests.tiny import mlp, sgd, weights

NUM_SAMPLES, GLOBAL_BATCH, NUM_STEPS = 65, 12, 20  # the last batch of an epoch has 5 samples
MAX_NORM = 0.05
PROCESSES = (1, 2, 3, 4)
ACCUMULATED = (1, 3, 4)
PRECISIONS = ("float64", "float32", "bf16")
ENGINES = {
    "DistributedDataParallelEngine": (dl.DistributedDataParallelEngine, dl.DistributedDataParallelAMPEngine),
    "FullyShardedDataParallelEngine": (dl.FullyShardedDataParallelEngine, dl.FullyShardedDataParallelAMPEngine),
    "HorovodEngine": (dl.HorovodEngine, dl.HorovodAMPEngine),
    "DataParallelEngine": (dl.DataParallelEngine, dl.DataParallelAMPEngine),
}


class Case(NamedTuple):
    """One training: batches in a step, precision, and whether it weighs tokens and clips."""

    accumulated: int
    precision: str
    by_tokens: bool
    is_clipped: bool


CASES = [
    Case(accumulated, precision, by_tokens, is_clipped)
    for accumulated in ACCUMULATED
    for precision in PRECISIONS
    for by_tokens in (False, True)
    for is_clipped in (False, True)
]


def data(precision: str) -> TensorDataset:
    """Return features, targets, and how many tokens each sample stands for: from 0 to 6."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    num_tokens = torch.randint(0, 7, (NUM_SAMPLES,), generator=generator)
    return TensorDataset(features.to(_dtype(precision)), features[:, :3].argmax(dim=1), num_tokens)


def loss_of(logits: Tensor, targets: Tensor, num_tokens: Tensor) -> Tensor:
    """Return the mean over the tokens of a batch."""
    losses = nn.functional.cross_entropy(
        logits.float() if logits.dtype == torch.bfloat16 else logits, targets, reduction="none"
    )
    return (losses * num_tokens).sum() / num_tokens.sum().clamp(min=1)


class TokenRunner(dl.Runner):
    """Weighs each batch by its tokens, or, with `by_tokens` False, each by its samples."""

    by_tokens = True

    def handle_batch(self, batch: Any) -> None:
        features, targets, num_tokens = batch
        if self.by_tokens:
            self.batch_weight = num_tokens.sum()
        else:
            num_tokens = torch.ones_like(num_tokens)
        self.batch_metrics["loss"] = loss_of(self.model(features), targets, num_tokens)


def train(engine: Any, case: Case, *, num_processes: int) -> Tensor:
    """Train with the engine; return the weights."""
    model, runner = mlp().to(_dtype(case.precision)), TokenRunner()
    runner.by_tokens = case.by_tokens
    data_loader = DataLoader(data(case.precision), batch_size=GLOBAL_BATCH // num_processes)
    clip = {"gradient_clip": MAX_NORM} if case.is_clipped else {}
    step = dl.OptimizerCallback("loss", accumulation_steps=case.accumulated, **clip)
    options = {"loaders": {"train": data_loader}, "callbacks": [dl.BackwardCallback("loss"), step]}
    options |= {"optimizer": sgd(model, lr=0.05), "num_steps": NUM_STEPS}
    tiny.train(model, runner=runner, engine=engine, **options)
    assert runner.optimizer_step == NUM_STEPS
    return weights(model)


def run_all(name: str, num_processes: int) -> list[Tensor]:
    """Train all cases with one engine, in processes that exist; return the weights."""
    plain, mixed = ENGINES[name]
    device: dict[str, Any] = {"device": "cpu"}
    number = {} if name == "DataParallelEngine" else {"num_processes": num_processes}
    engines = {each: (mixed if each == "bf16" else plain)(**number, **device) for each in PRECISIONS}
    return [train(engines[case.precision], case, num_processes=num_processes) for case in CASES]


def by_hand(case: Case) -> Tensor:
    """Train with a loop over global batches, in one process and without micro-batches."""
    model = mlp().to(_dtype(case.precision))
    optimizer = sgd(model, lr=0.05)
    steps = _steps(case)
    for _ in range(NUM_STEPS):
        features, targets, num_tokens = next(steps)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16" else nullcontext():
            loss = loss_of(model(features), targets, num_tokens if case.by_tokens else torch.ones_like(num_tokens))
        loss.backward()
        if case.is_clipped:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return weights(model)


def _steps(case: Case) -> Iterator[tuple[Tensor, ...]]:
    samples = data(case.precision)
    size = GLOBAL_BATCH * case.accumulated
    while True:
        for start in range(0, NUM_SAMPLES, size):
            yield samples[start : start + size]


def _dtype(precision: str) -> torch.dtype:
    return torch.float64 if precision == "float64" else torch.float32
