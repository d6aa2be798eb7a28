"""Tiny real models and data for tests, and a hand-written reference loop."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl

NUM_FEATURES, NUM_CLASSES = 6, 3


def classification(num_samples: int, *, seed: int = 0) -> TensorDataset:
    """Return learnable data, whose class is the index of the largest of the first three features."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return TensorDataset(features, features[:, :NUM_CLASSES].argmax(dim=1))


def mlp(*, seed: int = 1, dropout: float = 0.0, batch_norm: bool = False) -> nn.Sequential:
    """Create a perceptron with one hidden layer and weights drawn from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(NUM_FEATURES, 16)]
        if batch_norm:
            layers.append(nn.BatchNorm1d(16))
        layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, NUM_CLASSES)]
        return nn.Sequential(*layers)


def sgd(model: nn.Module, *, lr: float = 0.1) -> torch.optim.SGD:
    """Create SGD with momentum, so that the order of steps matters."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loader(num_samples: int, batch_size: int, *, seed: int = 0, **kwargs: Any) -> DataLoader[Any]:
    """Create a loader of :func:`classification` data."""
    return DataLoader(classification(num_samples, seed=seed), batch_size=batch_size, **kwargs)


def train(model: nn.Module | None = None, *, runner: Any = None, num_processes: int = 1, **options: Any) -> Any:
    """Train on the CPU without a console; return the runner.

    Args:
        model: :func:`mlp` by default.
        runner: SupervisedRunner by default.
        num_processes: more than one take DistributedDataParallelEngine.
        options: arguments of `train`; those of cross entropy, :func:`sgd` and 4 batches of 4 are replaced.
    """
    model = model or mlp()
    if num_processes > 1:
        options["engine"] = dl.DistributedDataParallelEngine(num_processes, device="cpu")
    elif not options.keys() & {"engine", "ddp"}:
        options["cpu"] = True
    if isinstance(options.get("loggers", {}), dict):
        options["loggers"] = {"console": None, **options.get("loggers", {})}
    if "optimizer" not in options:
        options["optimizer"] = sgd(model)
    defaults = {"criterion": nn.CrossEntropyLoss(), "loaders": {"train": loader(16, 4)}}
    return (runner or dl.SupervisedRunner()).train(model=model, **{**defaults, **options})


def train_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    *,
    num_epochs: int = 1,
    seed: int = 42,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: int = 1,
    max_norm: float | None = None,
) -> list[Tensor]:
    """Train with a hand-written loop, the independent reference; return the losses."""
    torch.manual_seed(seed)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    model.train()
    for _ in range(num_epochs):
        for index, (features, targets) in enumerate(batches):
            if index % accumulate == 0:
                optimizer.zero_grad()
            with autocast():
                loss = nn.functional.cross_entropy(model(features), targets)
            scaler.scale(loss / accumulate).backward()
            if (index + 1) % accumulate == 0:
                if max_norm is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                scaler.step(optimizer)
                scaler.update()
            losses.append(loss.detach())
    return losses


def weights(model: nn.Module) -> Tensor:
    """Return a model's full state as one float64 vector, for comparisons."""
    return torch.cat([each.detach().double().flatten() for each in model.state_dict().values()])


def quiet() -> dict[str, Any]:
    """Return arguments of `train` that disable the console logger."""
    return {"loggers": {"console": None}}
