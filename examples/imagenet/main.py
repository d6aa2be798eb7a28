"""ImageNet: one script for any engine; only `--engine` and the launcher change.

python examples/imagenet/main.py
python examples/imagenet/main.py --data /data/imagenet --engine DataParallelAMPEngine
torchrun --standalone --nproc-per-node=8 examples/imagenet/main.py --data /data/imagenet
The first command uses a few small synthetic images, for a machine without GPUs.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from runnerkit import dl, engines, utils
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.torchvision_cpu import import_torchvision

from imagenet_data import image_loaders, with_normalization

ENGINES = {name: getattr(engines, name) for name in dir(engines) if name.endswith("Engine") and name != "IEngine"}
# Defaults: with --data the recipe of Goyal et al. 2017 (arXiv:1706.02677), otherwise the trial.
RECIPE = {
    "model": "resnet50",
    "epochs": 90,
    "batch_size": 256,
    "warmup_epochs": 5,
    "image_size": 224,
    "lr": 0.1,
    "workers": 8,
}
TRIAL = {
    "model": "resnet18",
    "epochs": 2,
    "batch_size": 32,
    "warmup_epochs": 1,
    "image_size": 32,
    "lr": 0.0125,
    "workers": 0,
}


class ImageNetRunner(dl.SupervisedRunner):
    """A runner that creates data, model, optimizer and scheduler in each training process.

    Args:
        options: the command line, as parsed by `parse`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.num_classes = options.classes

    def get_loaders(self, stage: str) -> dict[str, dl.BatchPrefetchLoaderWrapper]:
        loaders = image_loaders(
            self.options.data,
            num_made_up=self.options.synthetic,
            num_classes=self.options.classes,
            image_size=self.options.image_size,
            batch_size=self.options.batch_size,
            num_workers=self.options.workers,
        )
        self.num_classes = len(loaders["train"].dataset.classes)
        return loaders

    def get_model(self, stage: str) -> nn.Module:
        models = import_torchvision().models
        return with_normalization(models.get_model(self.options.model, num_classes=self.num_classes))

    def get_optimizer(self, stage: str, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.options.lr, momentum=0.9, weight_decay=self.options.weight_decay)

    def get_scheduler(self, stage: str, optimizer: Optimizer) -> Any:
        warmup_epochs = self.options.warmup_epochs
        # The warm-up ends with the last step of its last epoch; the next scheduler counts from the end of that epoch.
        num_before = max(0, warmup_epochs - 1)
        after: Any = CosineAnnealingLR(optimizer, T_max=self.options.epochs - num_before)
        if self.options.scheduler == "step":
            after = MultiStepLR(optimizer, [epoch - num_before for epoch in self.options.drops])
        if not warmup_epochs:
            return after
        return dl.WarmupLR(optimizer, num_steps=warmup_epochs * len(self.loaders["train"]), after=after)


def model_names() -> list[str]:
    """List torchvision's classification models, except those with several outputs in training."""
    models = import_torchvision().models
    return sorted({*models.list_models(module=models)} - {"googlenet", "inception_v3"})


def make_engine(options: argparse.Namespace) -> dl.IEngine:
    """Create the requested engine, or the launcher's: Horovod for horovodrun, DDP for the others."""
    job, name = ProcessEnvironment.read(), options.engine
    if name is None and job is None and options.device is None:
        return utils.get_available_engine()
    if name is None:
        launched = "HorovodEngine" if job and job.launcher == "horovodrun" else "DistributedDataParallelEngine"
        name = launched if job else "DeviceEngine"
    if options.device and name in ("CPUEngine", "GPUEngine"):
        raise ValueError(f"--device {options.device}: {name} does not take a device; use DeviceEngine")
    arguments = {"device": options.device} if options.device else {}
    if name.startswith("Horovod"):
        arguments["compression"] = "fp16"  # sends gradients in half precision
    engine: dl.IEngine = ENGINES[name](**arguments)
    return engine


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data", type=Path, help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
    data.add_argument(
        "--synthetic", type=int, default=512, metavar="N", help="generate N training and N/4 validation images"
    )
    parser.add_argument("--classes", type=int, default=10, help="of synthetic images")
    parser.add_argument(
        "--model", choices=model_names(), metavar="NAME", help="one of torchvision's: " + ", ".join(model_names())
    )
    parser.add_argument("--engine", choices=sorted(ENGINES), metavar="NAME", help="(default: by launcher)")
    parser.add_argument("--device", help="device of the engine: cpu, cuda, or a GPU such as cuda:1")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch-size", type=int, help="images per batch and process")
    parser.add_argument("--image-size", type=int, help="height and width in pixels")
    parser.add_argument("--workers", type=int, help="worker processes per training process")
    parser.add_argument("--lr", type=float, help="for one process; N processes use N times as much")
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--warmup-epochs", type=int, help="epochs in which the rate grows from 0 in every step")
    parser.add_argument("--scheduler", choices=("step", "cosine"), default="step", help="schedule after the warm-up")
    parser.add_argument(
        "--drops", type=int, nargs="*", default=[30, 60, 80], help="step: epochs after which the rate is divided by 10"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in the logdir")
    parser.add_argument("--logdir", type=Path, help="(default: logs/imagenet/MODEL)")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    known, _ = parser.parse_known_args(arguments)
    parser.set_defaults(**(TRIAL if known.data is None else RECIPE))
    options = parser.parse_args(arguments)
    delattr(options, "local_rank")  # differs between processes, so it is not a hyperparameter
    if options.scheduler == "step" and min(options.drops, default=math.inf) < max(1, options.warmup_epochs):
        parser.error(f"--drops {options.drops}: must not be within the warm-up of {options.warmup_epochs} epochs")
    if options.data is None and options.classes < 5:
        parser.error(f"--classes {options.classes}: must be at least 5 for top-5 accuracy")
    options.logdir = options.logdir or Path("logs/imagenet", options.model)
    return options


def train(options: argparse.Namespace, callbacks: Iterable[dl.ICallback] = ()) -> dl.SupervisedRunner:
    """Train; logs and checkpoints go to the logdir."""
    return ImageNetRunner(options).train(
        criterion=nn.CrossEntropyLoss(label_smoothing=options.label_smoothing),
        callbacks=[dl.AccuracyCallback(topk=(1, 5)), *callbacks],
        num_epochs=options.epochs,
        lr_scale="linear",
        engine=make_engine(options),
        seed=options.seed,
        logdir=options.logdir,
        resume="auto" if options.resume else None,
        monitor="valid/accuracy",
        mode="max",
        hparams=vars(options),
        verbose=True,
    )


def main(arguments: Sequence[str] | None = None) -> dl.SupervisedRunner:
    """Train; the main process prints the accuracy."""
    options = parse(arguments)
    runner = train(options)
    if runner.engine.is_main_process:
        valid = runner.epoch_metrics["valid"]
        print(
            f"{options.model} on {type(runner.engine).__name__}: top-1 {valid['accuracy']:.2%}, "
            f"top-5 {valid['accuracy05']:.2%}, logs in {options.logdir}"
        )
    return runner


if __name__ == "__main__":
    main()
