"""Train a small CNN on real images in several processes with mixed precision, then list its results.

python examples/demo.py, or torchrun --nproc-per-node=2 examples/demo.py
"""

import argparse
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl, plot_metrics, read_metrics
from runnerkit.contrib.datasets.images import real_images

SEED = 42
MAX_LR = 1e-2


class Normalize(nn.Module):
    """A layer that maps (N, 1, H, W) uint8 to float32 of mean 0 and deviation 1; bytes are cheaper to transfer."""

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self.mean) / self.std


def cnn(train: TensorDataset, num_classes: int = 10) -> nn.Sequential:
    """Build a CNN of 0.1 million weights for the images of `train`; small, because most CPUs only emulate bf16."""
    pixels = train.tensors[0]
    quarter = math.ceil(pixels.shape[-1] / 4)  # side of an image after two strides of 2
    return nn.Sequential(
        Normalize(pixels.float().mean().item(), pixels.float().std().item()),
        nn.Sequential(nn.Conv2d(1, 12, kernel_size=4, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU()),
        nn.Sequential(nn.Conv2d(12, 32, kernel_size=3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(32 * quarter**2, 64), nn.ReLU(), nn.Linear(64, num_classes)),
    )


def in_memory(root: Path, *, train: bool, limit: int | None) -> TensorDataset:
    """Load Fashion-MNIST, or scikit-learn's digits if it is unavailable: (1, H, W) uint8 and a class."""
    data = real_images(root, train=train)
    return TensorDataset(data.images[:limit].unsqueeze(1), data.targets[:limit])


def train(options: argparse.Namespace) -> dl.SupervisedRunner:
    """Train with a single call."""
    data = {key: in_memory(options.data_root, train=key == "train", limit=options.limit) for key in ("train", "valid")}
    # DDP uses one process per GPU, 2 without GPUs, or those that the launcher has started.
    where: dict[str, Any] = {"ddp": True, "amp": True}
    if options.processes is not None:
        where = {"engine": dl.DistributedDataParallelEngine(options.processes, precision="amp")}

    torch.manual_seed(SEED)
    return dl.SupervisedRunner().train(
        model=cnn(data["train"]),
        criterion=nn.CrossEntropyLoss(),
        # Both are made in the processes that train, which know the number of steps.
        optimizer=partial(torch.optim.AdamW, lr=MAX_LR),
        scheduler=lambda optimizer, num_steps: OneCycleLR(optimizer, MAX_LR, total_steps=num_steps),
        loaders={
            "train": DataLoader(data["train"], batch_size=options.batch_size, shuffle=True),
            "valid": DataLoader(data["valid"], batch_size=4 * options.batch_size),
        },
        callbacks=[dl.AccuracyCallback(topk=(1, 3, 5))],
        num_epochs=options.epochs,
        logdir=options.logdir,
        monitor="valid/accuracy",
        mode="max",
        hparams={"batch_size": options.batch_size, "max_lr": MAX_LR},
        seed=SEED,
        verbose=True,
        **where,
    )


def show(logdir: Path) -> None:
    """Print the metrics and files of a run, then the TensorBoard command; plot the curves."""
    metrics = read_metrics(logdir).pivot_table(index=["epoch", "loader"], columns="metric", values="value", sort=False)
    print("", metrics.to_string(float_format="{:.4g}".format, na_rep=""), "", sep="\n")
    plot_metrics(logdir)
    for path in sorted(path for path in logdir.rglob("*") if path.is_file()):
        print(f"{path.stat().st_size:>10,}  {path}")
    # TensorBoard of this Python environment, which may not be on the PATH.
    command = Path(sys.executable).parent / "tensorboard"
    if command.is_relative_to(Path.cwd()):
        command = command.relative_to(Path.cwd())
    print(f"\n{command} --logdir {logdir}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and list the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="per process (default: 64)")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the images (default: data)")
    parser.add_argument("--logdir", type=Path, default=Path("logs", "demo", datetime.now().strftime("%Y%m%d-%H%M%S")))
    parser.add_argument("--limit", type=int, help="use only the first LIMIT images of each part")
    parser.add_argument("--processes", type=int, help="(default: one per GPU, or 2 without GPUs)")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    runner = train(options)
    if runner.engine.is_main_process:  # under torchrun, every process reaches this line
        show(options.logdir)


if __name__ == "__main__":
    main()
