"""DDP, mixed precision, warm-up, a plateau or cosine schedule, early stopping, Lookahead, and one seed for all.

python examples/training_tricks.py
python examples/training_tricks.py --engine AMPEngine --scheduler cosine --warmup-epochs 2 --warmup-from 0.0005
torchrun --standalone --nproc-per-node=2 examples/training_tricks.py --engine DistributedDataParallelAMPEngine
On NVIDIA GPUs with Apex: --engine DistributedDataParallelAPEXEngine
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader

from runnerkit import dl, engines, utils
from runnerkit.contrib import Compose, Digits, ImageToTensor, Lookahead

ENGINES = [name for name in dir(engines) if name.endswith("Engine") and name != "IEngine"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="DistributedDataParallelAMPEngine")
    parser.add_argument("--epochs", type=int, default=30, help="maximum number of epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per batch and process")
    parser.add_argument("--lr", type=float, default=0.01, help="after the warm-up")
    warmup = parser.add_mutually_exclusive_group()
    warmup.add_argument("--warmup-steps", type=int, default=50)
    warmup.add_argument("--warmup-epochs", type=int)
    parser.add_argument("--warmup-from", type=float, default=0.0, help="the learning rate of the first step or epoch")
    parser.add_argument("--scheduler", choices=("plateau", "cosine"), default="plateau")
    parser.add_argument("--drop-patience", type=int, default=2, help="plateau: epochs without a better loss")
    parser.add_argument("--patience", type=int, default=6, help="epochs without a better loss before training stops")
    parser.add_argument("--k", type=int, default=5, help="Lookahead: steps between synchronizations")
    parser.add_argument("--alpha", type=float, default=0.5, help="Lookahead: step size of the slow weights")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--logdir", help="(default: logs/training_tricks/ENGINE)")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    options.logdir = options.logdir or f"logs/training_tricks/{options.engine}"
    return options


def shift(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Shift a digit randomly by one pixel to the left or right, or not at all, with torch's generator."""
    return np.roll(image, int(torch.randint(-1, 2, ())), axis=1)


def make_scheduler(optimizer: Optimizer, options: argparse.Namespace) -> dl.WarmupLR:
    """Create a warm-up by steps or epochs, followed by the selected schedule by epochs."""
    length: dict[str, Any] = (
        {"num_steps": options.warmup_steps} if options.warmup_epochs is None else {"num_epochs": options.warmup_epochs}
    )
    after = (
        lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=options.drop_patience)
        if options.scheduler == "plateau"
        else lr_scheduler.CosineAnnealingLR(optimizer, options.epochs - (options.warmup_epochs or 0))
    )
    return dl.WarmupLR(optimizer, **length, start_lr=options.warmup_from, after=after)


def train(options: argparse.Namespace, callbacks: Iterable[dl.ICallback] = ()) -> dl.SupervisedRunner:
    """Train on scikit-learn's digits with all techniques combined."""
    utils.set_global_seed(options.seed)  # the same initial weights in every process
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=options.lr), k=options.k, alpha=options.alpha)
    transforms: dict[str, Callable[[Any], Tensor]] = {
        "train": Compose([shift, ImageToTensor()]), "valid": ImageToTensor(),
    }  # fmt: skip
    digits = {key: Digits(train=key == "train", transform=transform) for key, transform in transforms.items()}
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, options),
        loaders={key: DataLoader(data, options.batch_size, shuffle=key == "train") for key, data in digits.items()},
        callbacks=[
            dl.AccuracyCallback(),
            dl.EarlyStoppingCallback(options.patience, monitor="valid/loss", mode="min"),
            *callbacks,
        ],
        # Every process shuffles alike; dropout differs between processes, and augmentation between samples.
        seed=options.seed,
        num_epochs=options.epochs,
        logdir=options.logdir,
        resume="auto",
        engine=options.engine,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; the main process prints the accuracy."""
    options = parse(arguments)
    runner = train(options)
    if runner.engine.is_main_process:
        accuracy = runner.epoch_metrics["valid"]["accuracy"]
        print(f"{options.engine}: valid accuracy {accuracy:.4f} after {runner.epoch_step} epochs")


if __name__ == "__main__":
    main()
