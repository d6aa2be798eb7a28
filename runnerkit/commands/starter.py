"""What `runnerkit new` writes: a whole training, to be changed line by line."""

from __future__ import annotations

from pathlib import Path

from runnerkit.storage.atomic_file import write_text

SCRIPT = '''\
"""Train a classifier. Put your data and your model in place of these, and see that it learns.

python {name}
runnerkit run {name} --engine ddp --nproc 2
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl, utils

SEED = 42


def make_data(num_samples: int, seed: int) -> TensorDataset:
    """Eight features of each sample; its class is the place of the largest of the first three."""
    features = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, features[:, :3].argmax(dim=1))


def make_model() -> nn.Module:
    """From (N, 8) features to (N, 3) logits."""
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))


def main() -> None:
    """Train; see logs/{stem} for what is left."""
    utils.set_global_seed(SEED)  # the initial weights; `train` seeds what comes after
    model = make_model()
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loaders={{
            "train": DataLoader(make_data(2000, seed=0), batch_size=32, shuffle=True),
            "valid": DataLoader(make_data(500, seed=1), batch_size=100),
        }},
        callbacks=[dl.AccuracyCallback("logits", "targets")],
        num_epochs=5,
        logdir="logs/{stem}",
        resume="auto",  # goes on where it was killed
        valid_loader="valid",
        valid_metric="accuracy",
        minimize_valid_metric=False,
        seed=SEED,
    )
    if runner.engine.is_main_process:  # under torchrun each process comes here
        print("accuracy", runner.epoch_metrics["valid"]["accuracy"])


if __name__ == "__main__":
    main()
'''


def write_starter(path: Path) -> Path:
    """Write a script that runs as it is.

    Raises:
        ValueError: the name is none of a script.
        OSError: something is there, or nothing can be.
    """
    if path.suffix != ".py":
        raise ValueError(f"{path} must end in .py")
    if path.exists():
        raise FileExistsError(f"{path} is there already: choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, SCRIPT.format(name=path.name, stem=path.stem))
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path} ({error.strerror})") from error
    return path
