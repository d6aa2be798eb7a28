"""ResNet-9 on CIFAR-10, second way: several processes, mixed precision, and a custom sampler.

python examples/resnet9_cifar10/own_sampler.py, or torchrun --nproc-per-node=2 examples/resnet9_cifar10/own_sampler.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from runnerkit import dl, utils
from runnerkit.contrib import CIFAR10

from data import cifar10_loaders
from model import resnet9


class OwnSamplerRunner(dl.SupervisedRunner):
    """A runner that creates its loaders in each training process.

    Args:
        root: folder of CIFAR-10.
        batch_size: samples per batch and process.
    """

    def __init__(self, root: Path, batch_size: int) -> None:
        super().__init__()
        self.root = root
        self.images_per_batch = batch_size  # `batch_size` is the runner's own: that of the current batch

    def get_loaders(self, stage: str) -> dict[str, DataLoader[Any]]:
        """Shard the training images; the engine is already set up and has this process's rank.

        The engine does not change a loader with a DistributedSampler, and the runner calls its `set_epoch`. That
        sampler repeats images until all shards have the same size. The engine therefore shards the validation images:
        it repeats none, and the accuracy covers 10,000 images, each scored once.
        """
        loaders = cifar10_loaders(self.root, batch_size=self.images_per_batch)
        images = loaders["train"].dataset
        sampler: DistributedSampler[Any] = DistributedSampler(
            images, num_replicas=self.engine.num_processes, rank=self.engine.process_index, shuffle=True, seed=self.seed
        )
        return {**loaders, "train": DataLoader(images, batch_size=self.images_per_batch, sampler=sampler)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; logs and checkpoints go to the logdir, from which a second run resumes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of CIFAR-10, downloaded if missing")
    parser.add_argument("--logdir", type=Path, default=Path("logs/resnet9_cifar10/own_sampler"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--batch-size", type=int, default=128, help="per process")
    parser.add_argument("--cpu", action="store_true", help="do not use GPUs, but 2 processes or those of torchrun")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    delattr(options, "local_rank")  # differs between processes, so it is not a hyperparameter

    CIFAR10(options.root, download=True)  # download once, before the processes start
    utils.set_global_seed(42)  # train() sets the seed too, but only after the model is made
    model = resnet9(in_channels=3, num_classes=10, width=options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    OwnSamplerRunner(options.root, options.batch_size).train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs),
        callbacks=[dl.AccuracyCallback(topk=(1, 3, 5))],
        num_epochs=options.epochs,
        logdir=options.logdir,
        resume="auto",
        monitor="valid/accuracy",
        mode="max",
        hparams=vars(options),
        verbose=True,
        cpu=options.cpu,
        ddp=True,
        amp=True,
    )


if __name__ == "__main__":
    main()
