"""Mixed precision three ways in runnerkit, with the engines of examples/mixed_precision.py."""

from typing import Any

import torch
from torch import nn

from benchmarks.mixed_precision import work
from examples.mixed_precision import make_engine
from runnerkit import dl


class Observer(dl.Callback):
    """A callback that measures the processes of a run."""

    def __init__(self, way: str) -> None:
        super().__init__(order=dl.CallbackOrder.Internal - 1)
        self.way = way
        self.loss = 0.0
        self.everyones: list[work.Measured] = []

    def on_stage_start(self, runner: Any) -> None:
        self.watch = work.Watch(self.way, runner.engine.device)

    def on_step_end(self, runner: Any) -> None:
        self.watch.step()

    def on_epoch_end(self, runner: Any) -> None:
        self.loss += runner.epoch_metrics["train"]["loss"] / self.watch.size.num_epochs

    def on_stage_end(self, runner: Any) -> None:
        own = (self.loss, self.watch.seconds, self.watch.peaks_mib())
        self.everyones = runner.engine.gather_object(own)


def train(way: str, dtype: torch.dtype | None) -> work.Trained:
    engine = make_engine(way, None if dtype is None else dl.AMP(dtype))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, model, observer = work.size_for(device), work.make_model(device), Observer(way)
    batch_size = size.batch_size // engine.num_processes
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=work.make_optimizer(model),
        loaders={"train": dl.TensorLoader(*work.digits(device, train=True), batch_size=batch_size)},
        callbacks=[observer],
        num_epochs=size.num_epochs,
        engine=engine,
        loggers={"console": None},
    )
    return work.Trained(model, observer.everyones, is_main_process=runner.engine.is_main_process)


if __name__ == "__main__":
    work.main(train)
