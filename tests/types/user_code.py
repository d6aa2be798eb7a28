"""User code for type checkers: `mypy --strict` and pyright check this file, and it is never run.

Each wrong use has a `type: ignore`. An unused ignore is an error, so a change that hides an argument's name is caught.
"""

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl


class Net(nn.Module):
    """A model with its own method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def penalty(self) -> Tensor:
        return self.layer.weight.square().sum()


class Mine(dl.IRunner):
    """A runner whose hooks have narrower types than the base class: the user's own model, batch and optimizer."""

    model: Net

    def get_loaders(self, stage: str) -> dict[str, DataLoader[tuple[Tensor, ...]]]:
        return {"train": DataLoader(TensorDataset(torch.rand(8, 4)), batch_size=4)}

    def get_model(self, stage: str) -> Net:
        return Net()

    def get_optimizer(self, stage: str, model: Net) -> SGD:
        return SGD(model.parameters(), lr=0.1)

    def get_callbacks(self, stage: str) -> dict[str, dl.ICallback]:
        return {**super().get_callbacks(stage), "backward": dl.BackwardCallback("loss")}

    def handle_batch(self, batch: tuple[Tensor, ...]) -> None:
        self.batch_metrics["loss"] = self.model.penalty()


class Watch(dl.Callback):
    """A callback that accepts any runner and checks for its own runner class."""

    def on_epoch_end(self, runner: dl.IRunner) -> None:
        assert isinstance(runner, Mine)
        assert_type(runner.model.penalty(), Tensor)
        assert_type(runner.epoch_metrics, dict[str, dict[str, float]])


def right() -> None:
    """Use the library as the examples do, and check the inferred types."""
    models = {"left": nn.Linear(4, 2), "right": nn.Sequential(nn.Linear(4, 2))}
    runner = dl.SupervisedRunner().train(
        model=models,
        criterion={"left": nn.CrossEntropyLoss()},
        optimizer={key: SGD(model.parameters(), lr=0.1) for key, model in models.items()},
        loaders={"train": dl.TensorLoader(torch.rand(8, 4), batch_size=4)},
        callbacks=[Watch(), dl.AccuracyCallback("logits", "targets")],
        loggers={"console": None, "mine": dl.ConsoleLogger()},
        engine=dl.DistributedDataParallelAMPEngine(2, sync_bn=True, timeout_s=60, device="cpu"),
    )
    assert_type(runner, dl.SupervisedRunner)
    dl.SupervisedRunner(engine="cpu").train(engine="ddp", precision="bf16", callbacks=[dl.AccuracyCallback()])
    dl.DistributedDataParallelEngine(2, precision="bf16")
    runner.predict_loader([], engine="cpu", precision="amp")
    assert_type(Mine().run(), Mine)
    assert_type(runner.evaluate_loader(runner.loaders["train"]), dict[str, float])


def wrong() -> None:
    """Misspell arguments and pass values of the wrong type."""
    runner = dl.SupervisedRunner()
    runner.train(num_epoch=3)  # type: ignore[call-arg]
    runner.train(num_epochs="3")  # type: ignore[arg-type]
    runner.train(lr_scale="cubic")  # type: ignore[arg-type]
    runner.train(precision="bf61")  # type: ignore[arg-type]
    dl.CPUEngine(precision="bf61")  # type: ignore[arg-type]
    runner.predict_loader(loader=[], ddpp=True)  # may be arguments of a custom predict_batch: no checker can know
    dl.DistributedDataParallelAMPEngine(2, sync_bm=True)  # type: ignore[call-arg]
    dl.FullyShardedDataParallelAMPEngine(2, replicas="2")  # type: ignore[arg-type]
    dl.HorovodAMPEngine(2, opp="sum")  # type: ignore[call-arg]
    dl.HorovodAPEXEngine(2, opt_lvl="O1")  # type: ignore[call-arg]
