"""One training script for any engine and launcher: only the command changes.

python examples/any_engine.py --engine DistributedDataParallelAMPEngine
torchrun --standalone --nproc-per-node=2 examples/any_engine.py --engine FullyShardedDataParallelEngine
"""

import argparse
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl, engines
from runnerkit.contrib import Digits, ImageToTensor

ENGINES = [name for name in dir(engines) if name.endswith("Engine") and name != "IEngine"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="DistributedDataParallelEngine")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch and process")
    parser.add_argument("--lr-scale", choices=("linear", "sqrt"), help="scale the learning rate for N processes")
    parser.add_argument("--logdir", help="(default: logs/any_engine/ENGINE)")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    options.logdir = options.logdir or f"logs/any_engine/{options.engine}"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on scikit-learn's digits; the main process prints the accuracy."""
    options = parse(arguments)
    digits = {key: Digits(train=key == "train", transform=ImageToTensor()) for key in ("train", "valid")}
    torch.manual_seed(42)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.003),
        loaders={key: DataLoader(data, options.batch_size, shuffle=key == "train") for key, data in digits.items()},
        callbacks=[dl.AccuracyCallback()],
        num_epochs=options.epochs,
        logdir=options.logdir,
        resume="auto",
        lr_scale=options.lr_scale,
        engine=options.engine,
    )
    if runner.engine.is_main_process:
        accuracy = runner.epoch_metrics["valid"]["accuracy"]
        print(f"{options.engine}: valid accuracy {accuracy:.4f}, logs in {options.logdir}")


if __name__ == "__main__":
    main()
