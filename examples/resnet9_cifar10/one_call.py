"""ResNet-9 on CIFAR-10, first way: one call.

python examples/resnet9_cifar10/one_call.py, or torchrun --nproc-per-node=2 examples/resnet9_cifar10/one_call.py --ddp
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from runnerkit import dl, utils

from data import cifar10_loaders
from model import resnet9


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; logs and checkpoints go to the logdir, from which a second run resumes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of CIFAR-10, downloaded if missing")
    parser.add_argument("--logdir", type=Path, default=Path("logs/resnet9_cifar10/one_call"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--batch-size", type=int, default=128, help="per process")
    parser.add_argument("--cpu", action="store_true", help="do not use GPUs")
    parser.add_argument("--ddp", action="store_true", help="train in several processes; required under torchrun")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    delattr(options, "local_rank")  # differs between processes, so it is not a hyperparameter

    utils.set_global_seed(42)  # train() sets the seed too, but only after the model is made
    model = resnet9(in_channels=3, num_classes=10, width=options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs),
        loaders=cifar10_loaders(options.root, batch_size=options.batch_size),
        callbacks=[dl.AccuracyCallback(topk=(1, 3, 5))],
        num_epochs=options.epochs,
        logdir=options.logdir,
        resume="auto",
        monitor="valid/accuracy",
        mode="max",
        hparams=vars(options),
        verbose=True,
        cpu=options.cpu,
        ddp=options.ddp,
    )


if __name__ == "__main__":
    main()
