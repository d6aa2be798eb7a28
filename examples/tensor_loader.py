"""Train on images that fit in memory: batches by indexing, augmentation of whole batches on the device.

python examples/tensor_loader.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from runnerkit import dl, utils
from runnerkit.contrib import Digits


def digits_loader(*, train: bool, batch_size: int, device: str | None) -> dl.TensorLoader:
    """Load scikit-learn's digits as (N, 1, 8, 8) uint8 and classes; the training part is shuffled."""
    digits = Digits(train=train)
    return dl.TensorLoader(
        {"features": digits.images.unsqueeze(1), "targets": digits.targets},
        batch_size=batch_size,
        shuffle=train,
        device=device,
    )


def cnn(num_classes: int = 10) -> nn.Sequential:
    """Build a CNN of 10 thousand weights that takes bytes; it includes the normalization, also for predictions."""
    return nn.Sequential(
        dl.BatchNormalize(mean=[0.305], std=[0.376]),
        nn.Sequential(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, num_classes)),
    )


def main(arguments: Sequence[str] | None = None) -> dl.SupervisedRunner:
    """Train, print the accuracy, and return the runner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="per process (default: 64)")
    parser.add_argument("--device", help='device that stores the images, such as "cuda" (default: main memory)')
    parser.add_argument("--logdir", type=Path, default=Path("logs/tensor_loader"))
    parser.add_argument("--cpu", action="store_true", help="do not use GPUs")
    parser.add_argument("--ddp", action="store_true", help="train in several processes")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)

    utils.set_global_seed(42)
    model = cnn()
    # It does not change images in evaluation. No flips: a mirrored digit is a different symbol.
    augment = dl.BatchTransformCallback(dl.BatchRandomCrop(padding=1), input_key="features")
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loaders={
            key: digits_loader(train=key == "train", batch_size=options.batch_size, device=options.device)
            for key in ("train", "valid")
        },
        callbacks=[augment, dl.AccuracyCallback()],
        num_epochs=options.epochs,
        logdir=options.logdir,
        cpu=options.cpu,
        ddp=options.ddp,
    )
    if runner.engine.is_main_process:  # under torchrun, every process reaches this line
        print(f"accuracy on unseen images: {runner.epoch_metrics['valid']['accuracy']:.1%}")
    return runner


if __name__ == "__main__":
    main()
