"""Fourteen models on CIFAR-10 or Fashion-MNIST: one script for plain python, torchrun and horovodrun.

python examples/cifar10/main.py --model ResNet18
torchrun --standalone --nproc-per-node=2 examples/cifar10/main.py --model ResNet18
horovodrun --gloo -np 2 -H localhost:2 python examples/cifar10/main.py --model ResNet18
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from runnerkit import dl, engines, utils
from runnerkit.engines.process_environment import ProcessEnvironment

from images import DATASETS, augmentation, image_loaders, with_normalization
from zoo import MODELS

ENGINES = [name for name in dir(engines) if name.endswith("Engine") and name != "IEngine"]


class ZooRunner(dl.SupervisedRunner):
    """A runner that creates data, model and optimizer in each training process.

    Args:
        options: the command line, as parsed by `parse`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options

    def get_loaders(self, stage: str) -> dict[str, dl.TensorLoader]:
        options = self.options
        return image_loaders(options.root, batch_size=options.batch_size, dataset=options.dataset)

    def get_model(self, stage: str) -> nn.Module:
        return with_normalization(MODELS[self.options.model](width=self.options.width), dataset=self.options.dataset)

    def get_optimizer(self, stage: str, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.options.lr, momentum=0.9, weight_decay=5e-4)

    def get_scheduler(self, stage: str, optimizer: Optimizer) -> CosineAnnealingLR | OneCycleLR:
        if self.options.schedule == "one-cycle":  # steps after each batch
            num_steps = self.options.epochs * len(self.loaders["train"])
            return OneCycleLR(optimizer, self.options.lr, total_steps=num_steps)
        return CosineAnnealingLR(optimizer, T_max=self.options.epochs)  # steps after each epoch


def default_engine() -> dl.IEngine:
    """Choose an engine by launcher: one process for plain python, Horovod for horovodrun, otherwise DDP."""
    job = ProcessEnvironment.read()
    if job is None:
        return utils.get_available_engine()
    return dl.HorovodEngine() if job.launcher == "horovodrun" else dl.DistributedDataParallelEngine()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="ResNet18", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--dataset", choices=DATASETS, default="cifar10")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument(
        "--schedule", choices=("cosine", "one-cycle"), default="cosine", help="one-cycle is for few epochs"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="for one process; N processes use N times as much")
    parser.add_argument("--batch-size", type=int, default=128, help="per process")
    parser.add_argument("--width", type=float, default=1.0, help="factor for the channels, for example 0.25 on a CPU")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in the logdir")
    parser.add_argument("--engine", choices=ENGINES, metavar="NAME", help="(default: by launcher)")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of the images, downloaded if missing")
    parser.add_argument("--logdir", type=Path, help="(default: logs/DATASET/MODEL)")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    delattr(options, "local_rank")  # differs between processes, so it is not a hyperparameter
    options.logdir = options.logdir or Path("logs", options.dataset, options.model)
    return options


def main(arguments: Sequence[str] | None = None) -> dl.SupervisedRunner:
    """Train; logs and checkpoints go to the logdir, and one process prints the accuracy."""
    options = parse(arguments)
    DATASETS[options.dataset](options.root, download=True)  # before plain python starts several processes
    runner = ZooRunner(options).train(
        criterion=nn.CrossEntropyLoss(),
        callbacks=[
            dl.BatchTransformCallback(augmentation(), input_key="features"),
            dl.AccuracyCallback(),
        ],
        num_epochs=options.epochs,
        lr_scale="linear",
        engine=options.engine or default_engine(),
        logdir=options.logdir,
        resume="auto" if options.resume else None,
        resume_options="arguments",  # --resume --lr 0.01 --epochs 300 uses that rate and the longer schedule
        monitor="valid/accuracy",
        mode="max",
        hparams=vars(options),
        verbose=True,
    )
    if runner.engine.is_main_process:
        num_parameters = sum(parameter.numel() for parameter in runner.engine.unwrap(runner.model).parameters())
        accuracy = runner.epoch_metrics["valid"]["accuracy"]
        print(
            f"{options.model}: {num_parameters:,} parameters, valid accuracy {accuracy:.2%}, logs in {options.logdir}"
        )
    return runner


if __name__ == "__main__":
    main()
