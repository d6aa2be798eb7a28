"""Case a in TorchTNT: an AutoUnit, its callbacks and loggers; averaging is up to the user."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtnt.framework import AutoUnit, State, train
from torchtnt.framework.callbacks import TQDMProgressBar
from torchtnt.utils.loggers import CSVLogger, TensorBoardLogger

from benchmarks.steps import work


class Unit(AutoUnit[work.Batch]):
    def __init__(self, module: nn.Module, variant: str, folder: Path) -> None:
        super().__init__(module=module, device=torch.device("cpu"))
        self.variant = variant
        self.criterion = nn.CrossEntropyLoss()
        self.loss_sum, self.hits, self.num_samples = torch.zeros((), dtype=torch.float64), torch.zeros(()), 0
        self.loggers: list[Any] = []
        if variant == "log":
            # By default, it rewrites the whole file for each row.
            self.loggers = [
                CSVLogger(str(folder / "steps.csv"), steps_before_flushing=1000),
                TensorBoardLogger(str(folder)),
            ]

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        return work.make_optimizer(module), None

    def compute_loss(self, state: State, data: work.Batch) -> tuple[Tensor, Tensor]:
        features, targets = data
        logits = self.module(features)
        return self.criterion(logits, targets), logits

    def on_train_step_end(self, state: State, data: work.Batch, step: int, results: Any) -> None:
        if self.variant == "nothing":
            return
        targets = data[1]
        self.loss_sum += results.loss.detach() * len(targets)
        self.num_samples += len(targets)
        if self.variant == "loss":
            return
        right = work.num_right(results.outputs, targets)
        self.hits += right
        if step % work.LOG_EVERY == 0:
            for logger in self.loggers:
                scalars = {"loss": results.loss.item(), "accuracy": right.item() / len(targets)}
                logger.log_dict(scalars, step)


def run(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    model = work.make_model()
    unit = Unit(model, variant, folder)
    train(unit, batches, max_epochs=1, callbacks=[TQDMProgressBar()] if variant == "bar" else None)
    for logger in unit.loggers:
        logger.close()
    if variant == "nothing":
        return work.Trained(model)
    accuracy = None if variant == "loss" else unit.hits.item() / unit.num_samples
    return work.Trained(model, unit.loss_sum.item() / unit.num_samples, accuracy)


if __name__ == "__main__":
    work.main(run)
