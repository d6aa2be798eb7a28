"""Part b: the time of a step of other frameworks that are installed, in turns with the same hand-written loop."""

import contextlib
import importlib
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.on_gpu import work
from benchmarks.on_gpu.check import Check, Figures, Setting, Skipped
from benchmarks.on_gpu.step_time import ByHand, Turns, with_runnerkit
from benchmarks.on_gpu.work import Batch
from runnerkit.torchvision_cpu import import_torchvision

Train = Callable[[nn.Module, Turns, Setting], None]


def lightning(model: nn.Module, turns: Turns, setting: Setting) -> None:
    """Train with Lightning's Trainer, which logs nothing and shows no bar."""
    package = _imported("lightning", "lightning.pytorch", "pytorch_lightning")

    class Module(package.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return work.make_optimizer(self)

    with tempfile.TemporaryDirectory() as folder:
        trainer = package.Trainer(
            max_epochs=1,
            accelerator="gpu" if setting.is_gpu else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(), turns)


def accelerate(model: nn.Module, turns: Turns, setting: Setting) -> None:
    """Train with Accelerate's model, optimizer and backward in a hand-written loop."""
    accelerator = _imported("accelerate").Accelerator(cpu=not setting.is_gpu)
    prepared, optimizer = accelerator.prepare(model, work.make_optimizer(model))
    prepared.train()
    for features, targets in turns:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(prepared(features), targets))
        optimizer.step()


def transformers(model: nn.Module, turns: Turns, setting: Setting) -> None:
    """Train with the Trainer of transformers, which sums the loss."""
    package = _imported("transformers")

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.model(features), labels)}

    class Named:
        batch_size = turns.batch_size

        def __len__(self) -> int:
            return len(turns)

        def __iter__(self) -> Any:
            return ({"features": features, "labels": labels} for features, labels in turns)

    class ReadyBatches(package.Trainer):  # type: ignore[name-defined, misc]
        def get_train_dataloader(self) -> Any:
            return self.train_dataset

    module = WithLoss()
    with tempfile.TemporaryDirectory() as folder:
        try:
            arguments = package.TrainingArguments(
                output_dir=folder,
                num_train_epochs=1,
                per_device_train_batch_size=turns.batch_size,
                max_grad_norm=0.0,
                use_cpu=not setting.is_gpu,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
        except ImportError as error:
            raise Skipped(f"its Trainer needs more packages: {str(error).splitlines()[0]}") from None
        ReadyBatches(
            model=module, args=arguments, train_dataset=Named(), optimizers=(work.make_optimizer(module), None)
        ).train()


def _imported(*names: str) -> Any:
    """Import the first package that is installed, after torchvision, which transformers and torchmetrics import.

    Raises:
        Skipped: none is installed.
    """
    with contextlib.suppress(ImportError):
        import_torchvision()  # a CUDA build beside a CPU torch needs the workaround
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or name
    raise Skipped(f"{missing} is not installed")


def measure(train: Train, setting: Setting) -> Figures:
    """Time a framework's steps of the tiny model beside the hand-written loop, then runnerkit's in the same way."""
    warnings.simplefilter("ignore")  # advice about data loaders
    job = work.tiny(setting)
    batch = job.make_batch()
    figures: Figures = {}
    for name in ("framework", "runnerkit"):
        reference = ByHand(job, batch, setting, compile=None)
        turns = Turns(batch, reference.run, setting, num_steps=job.num_steps, num_pairs=setting.size(gpu=10, cpu=2))
        if name == "framework":
            train(job.make_model(), turns, setting)
        else:
            with_runnerkit(job, turns, setting, compile=None)
        measured = turns.figures()
        figures |= {f"{name}: ratio": measured["ratio"], f"{name}: ratios": measured["ratios"]}
    return figures


CHECKS = (
    Check("Lightning", partial(measure, lightning), is_timed=True),
    Check("Accelerate", partial(measure, accelerate), is_timed=True),
    Check("transformers' Trainer", partial(measure, transformers), is_timed=True),
)
