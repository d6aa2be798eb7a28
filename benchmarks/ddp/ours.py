"""Cases c and d in runnerkit, which starts its processes or joins those of torchrun."""

import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.ddp.work import (
    BATCH_SIZE,
    WORLD_SIZE,
    Notes,
    data,
    is_weighted,
    num_metrics_asked,
    numbers,
    report,
    width,
)
from benchmarks.steps import work
from runnerkit import dl


class Observer(dl.Callback):
    """A callback that records the times of steps and of the loader's end."""

    def __init__(self, path: str) -> None:
        super().__init__(order=dl.CallbackOrder.Internal - 1)
        self.notes = Notes(path)

    def on_stage_start(self, runner: Any) -> None:
        torch.set_num_threads(1)
        self.notes.begin()

    def on_step_end(self, runner: Any) -> None:
        self.notes.step()

    def on_epoch_end(self, runner: Any) -> None:
        if runner.engine.is_main_process:
            self.notes.loader_is_over()


class ManyNumbers(dl.SupervisedRunner):
    def __init__(self, num_metrics: int, *, is_weighted: bool) -> None:
        super().__init__()
        self.num_metrics, self.is_weighted = num_metrics, is_weighted

    def get_optimizer(self, stage: str, model: Any) -> torch.optim.Optimizer:
        return work.make_optimizer(model)  # in the training processes, as in raw.py: the first one takes torch 2 s

    def handle_batch(self, batch: Any) -> None:
        super().handle_batch(batch)
        if self.is_weighted:
            self.batch_weight = batch["targets"].sum()
        self.batch_metrics.update(numbers(self.batch["logits"], num_metrics=self.num_metrics))


def train(path: str) -> None:
    runner = ManyNumbers(num_metrics_asked(), is_weighted=is_weighted()).train(
        model=work.make_model(width()), criterion=nn.CrossEntropyLoss(), callbacks=[Observer(path)],
        loaders={"train": DataLoader(data(), batch_size=BATCH_SIZE)}, loggers={"console": None},
        engine=dl.DistributedDataParallelEngine(num_processes=WORLD_SIZE, backend="gloo", device="cpu"),
    )  # fmt: skip
    if runner.engine.is_main_process:
        report(path, runner.epoch_metrics["train"]["loss"])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(f"{folder}/notes.json")


if __name__ == "__main__":
    main()
