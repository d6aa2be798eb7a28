"""ResNet-9 on CIFAR-10, third way: a custom runner with every hook written out.

python examples/resnet9_cifar10/whole_runner.py, or torchrun --nproc-per-node=2 examples/resnet9_cifar10/whole_runner.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.contrib import CIFAR10

from data import cifar10_loaders
from model import resnet9

MAX_LR = 1e-2


class ResNet9Runner(dl.IRunner):
    """A complete run in one class; every hook except `get_engine` is called in the training processes.

    Args:
        options: the command line, as parsed by `main`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options

    @property
    def seed(self) -> int:
        return 42

    @property
    def hparams(self) -> dict[str, Any]:
        return vars(self.options)

    @property
    def stages(self) -> list[str]:
        return ["train"]

    def get_stage_len(self, stage: str) -> int:
        return int(self.options.epochs)

    def get_engine(self) -> dl.IEngine:
        return dl.DistributedDataParallelAMPEngine(self.options.processes, device="cpu" if self.options.cpu else None)

    def get_loggers(self) -> dict[str, dl.ILogger]:
        return {
            "console": dl.ConsoleLogger(),
            "csv": dl.CSVLogger(self.options.logdir),
            "tensorboard": dl.TensorboardLogger(self.options.logdir),
        }

    def get_loaders(self, stage: str) -> dict[str, DataLoader[Any]]:
        return cifar10_loaders(self.options.root, batch_size=self.options.batch_size)

    def get_model(self, stage: str) -> nn.Module:
        return resnet9(in_channels=3, num_classes=10, width=self.options.width)

    def get_criterion(self, stage: str) -> nn.Module:
        return nn.CrossEntropyLoss()

    def get_optimizer(self, stage: str, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=MAX_LR, weight_decay=1e-2)

    def get_scheduler(self, stage: str, optimizer: Optimizer) -> OneCycleLR:
        # self.loaders holds this process's shard: its length is the number of steps per epoch.
        return OneCycleLR(optimizer, MAX_LR, total_steps=self.get_stage_len(stage) * len(self.loaders["train"]))

    def get_callbacks(self, stage: str) -> dict[str, dl.ICallback]:
        return {
            "criterion": dl.CriterionCallback(input_key="logits", target_key="targets", metric_key="loss"),
            "accuracy": dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1, 3, 5)),
            "backward": dl.BackwardCallback(metric_key="loss"),
            "optimizer": dl.OptimizerCallback(metric_key="loss"),
            "scheduler": dl.SchedulerCallback(interval="step"),
            "checkpoint": dl.CheckpointCallback(
                self.options.logdir,
                monitor="valid/accuracy",
                mode="max",
                content="runner",
                resume_runner=self.options.resume,
            ),
        }

    def handle_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        """Compute the callbacks' inputs: (N, 10) logits and (N,) targets."""
        features, targets = batch
        self.batch = {"features": features, "targets": targets, "logits": self.model(features)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; logs and checkpoints go to the logdir."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of CIFAR-10, downloaded if missing")
    parser.add_argument("--logdir", type=Path, default=Path("logs/resnet9_cifar10/whole_runner"))
    parser.add_argument("--resume", type=Path, help="checkpoint or logdir to resume from")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--batch-size", type=int, default=128, help="per process")
    parser.add_argument("--processes", type=int, help="(default: one per GPU, or 2 without GPUs)")
    parser.add_argument("--cpu", action="store_true", help="do not use GPUs")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    delattr(options, "local_rank")  # differs between processes, so it is not a hyperparameter

    CIFAR10(options.root, download=True)  # download once, before the processes start
    ResNet9Runner(options).run()


if __name__ == "__main__":
    main()
