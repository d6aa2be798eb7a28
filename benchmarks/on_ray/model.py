"""The user's own module: data set, model, and an optimizer that records its first step for the benchmark.

The file "deaths" has a step number for each life of the last process, at which it ends itself by SIGKILL.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FOLDER = "BENCHMARK_FOLDER"  # variable of the environment of all processes


class RecordingSGD(torch.optim.SGD):
    """SGD; a pickled optimizer keeps no attributes, so the number of steps is the class's."""

    num_steps = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        RecordingSGD.num_steps += 1
        folder = Path(os.environ[FOLDER])
        if RecordingSGD.num_steps == 1:
            (folder / f"step.{os.getpid()}").write_text(str(time.time()))
        deaths = folder / "deaths"
        if deaths.exists() and dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            next_one, *others = deaths.read_text().split()
            if RecordingSGD.num_steps == int(next_one):
                deaths.write_text(" ".join(others)) if others else deaths.unlink()
                (folder / f"death.{os.getpid()}").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        return loss


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(256, 64, generator=generator)
    return TensorDataset(features, (features[:, 0] > 0).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))


def make_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return RecordingSGD(parameters, lr=0.1)
