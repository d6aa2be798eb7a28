"""Mixed precision in three ways: one device, DataParallel, DDP with SyncBatchNorm and unused parameters.

python examples/mixed_precision.py
python examples/mixed_precision.py --way ddp --fp32
torchrun --standalone --nproc-per-node=2 examples/mixed_precision.py --way ddp
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runnerkit import dl
from runnerkit.contrib import Digits

WAYS: dict[str, type[dl.IEngine]] = {
    "one": dl.DeviceEngine,
    "dp": dl.DataParallelEngine,
    "ddp": dl.DistributedDataParallelEngine,
}


def make_engine(way: str, precision: dl.Precision | None, **options: Any) -> dl.IEngine:
    """Create the engine, in fp32 (None) or with ``dl.AMP()``: fp16 with a scaler on GPUs, bf16 on CPUs."""
    if way == "ddp":
        # SyncBatchNorm needs GPUs; without find_unused_parameters the unused head fails DDP's second step.
        options |= {"sync_bn": torch.cuda.is_available(), "find_unused_parameters": True, "cudnn_benchmark": True}
    return WAYS[way](precision=precision, **options)


class CNN(nn.Module):
    """A digit classifier with an unused head, for example for predicting rotations in pretraining."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, width, kernel_size=3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Sequential(nn.Conv2d(width, 2 * width, kernel_size=3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
            nn.Sequential(nn.AdaptiveMaxPool2d(4), nn.Flatten()),
        )
        self.digits, self.rotations = nn.Linear(32 * width, 10), nn.Linear(32 * width, 4)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.digits(self.body(images))
        return logits


def loader(*, train: bool, batch_size: int) -> dl.TensorLoader:
    """Load scikit-learn's digits as (N, 1, 8, 8) in [0, 1] and classes; the training part is shuffled."""
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.unsqueeze(1) / 255, digits.targets, batch_size=batch_size, shuffle=train)


def train(engine: dl.IEngine, callbacks: Sequence[dl.ICallback] = ()) -> dl.SupervisedRunner:
    """Train for 3 epochs in steps of 64 images over all processes."""
    torch.manual_seed(0)
    model = CNN()
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loaders={
            key: loader(train=key == "train", batch_size=64 // engine.num_processes) for key in ("train", "valid")
        },
        callbacks=[dl.AccuracyCallback(), *callbacks],
        num_epochs=3,
        engine=engine,
        loggers={"console": None},
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train in each way; print the accuracies on the main process and return them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--fp32", action="store_true", help="disable mixed precision")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    runners = {way: train(make_engine(way, None if options.fp32 else dl.AMP())) for way in options.way}
    learned = {way: runner.epoch_metrics["valid"]["accuracy"] for way, runner in runners.items()}
    if runners[options.way[0]].engine.is_main_process:
        print("valid accuracy: " + ", ".join(f"{way} {accuracy:.1%}" for way, accuracy in learned.items()))
    return learned


if __name__ == "__main__":
    main()
