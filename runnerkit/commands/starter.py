"""The training script or project that `runnerkit new` writes as a starting point."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from runnerkit.commands.project_template import FILES
from runnerkit.storage.atomic_file import write_text
from runnerkit.storage.remote.urls import as_url, plain_path

# A script of such a name is found first, by everything that it imports.
_IMPORTED = {*sys.stdlib_module_names, "fsspec", "numpy", "runnerkit", "tensorboard", "torch", "tqdm", "yaml"}

SCRIPT = '''\
"""Train a classifier: replace the data and the model with your own.

python {quoted}
runnerkit run {quoted} --engine ddp --nproc 2
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl, utils

SEED = 42


def make_data(num_samples: int, seed: int) -> TensorDataset:
    """Draw (N, 8) features; the class of a sample is the index of the largest of its first three."""
    features = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, features[:, :3].argmax(dim=1))


def make_model() -> nn.Module:
    """Map (N, 8) features to (N, 3) logits."""
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))


def main() -> None:
    """Train, and write logs and checkpoints to logs/{stem}."""
    utils.set_global_seed(SEED)  # for the initial weights; `train` seeds the rest
    model = make_model()
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loaders={{
            "train": DataLoader(make_data(2000, seed=0), batch_size=32, shuffle=True),
            "valid": DataLoader(make_data(500, seed=1), batch_size=100),
        }},
        callbacks=[dl.AccuracyCallback()],
        num_epochs=5,
        logdir="logs/{stem}",
        resume="auto",  # continue after an interruption
        monitor="valid/accuracy",
        mode="max",
        seed=SEED,
    )
    if runner.engine.is_main_process:  # torchrun starts several processes
        print("accuracy", runner.epoch_metrics["valid"]["accuracy"])


if __name__ == "__main__":
    main()
'''


def write_starter(path: Path) -> list[Path]:
    """Write a script that runs without changes, or a project if `path` does not end in .py; return the new files.

    Raises:
        ValueError: `path` is a URL, ends in something else than .py, contains what Python's strings cannot, or would
            hide a module that training imports.
        OSError: `path` exists, unless it is an empty folder for a project, or cannot be written.
    """
    if (url := as_url(path)) is not None:
        raise ValueError(f"{url} is the URL of a store: choose a local folder; --logdir of a run may be a URL")
    path = plain_path(path)
    if path.suffix not in ("", ".py"):
        raise ValueError(f"{path} must end in .py for a script; the name of a project, a folder, lacks a suffix")
    name = path.resolve().name
    if not name.isprintable() or any(each in name for each in '"\\'):
        raise ValueError(f"the name {name!r} stands in Python's strings: choose one without quotes and backslashes")
    if path.suffix == ".py" and path.stem in _IMPORTED:
        raise ValueError(f"{path} would hide the module {path.stem} from Python: choose another name")
    is_free = not path.exists() or (path.suffix == "" and path.is_dir() and not any(path.iterdir()))
    if not is_free:
        raise FileExistsError(f"{path} exists already: choose another name")
    if path.suffix == ".py":
        texts = {path: SCRIPT.format(quoted=shlex.quote(path.name), stem=path.stem)}
    else:
        texts = {path / file: text.replace("@NAME@", name) for file, text in FILES.items()}
    for file, text in texts.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
        except OSError as error:
            raise OSError(error.errno, f"cannot write {file} ({error.strerror})") from error
    return list(texts)
