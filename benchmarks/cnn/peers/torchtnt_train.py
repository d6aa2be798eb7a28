"""Case b in TorchTNT: `fit` with an AutoUnit; averaging is up to the user."""

from typing import Any

import torch
from torch import Tensor, nn
from torchtnt.framework import AutoUnit, State, fit

from benchmarks.cnn import work


class Unit(AutoUnit[tuple[Tensor, Tensor]]):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module=module, device=torch.device("cpu"))
        self.criterion = nn.CrossEntropyLoss()
        self.sums = {"train": work.Sums(), "valid": work.Sums()}

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        return work.make_optimizer(module), None

    def compute_loss(self, state: State, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.module(data[0])
        return self.criterion(logits, data[1]), logits

    def on_train_step_end(self, state: State, data: tuple[Tensor, Tensor], step: int, results: Any) -> None:
        self.sums["train"].add(results.loss, results.outputs, data[1])

    def on_eval_step_end(
        self, state: State, data: tuple[Tensor, Tensor], step: int, loss: Tensor, outputs: Tensor
    ) -> None:
        self.sums["valid"].add(loss, outputs, data[1])


def train(images: dict[str, work.Images]) -> work.Metrics:
    loaders, unit = work.loaders(images), Unit(work.make_model(images))
    fit(unit, loaders["train"], loaders["valid"], max_epochs=1)
    return {key: sums.means() for key, sums in unit.sums.items()}


if __name__ == "__main__":
    work.main(train)
