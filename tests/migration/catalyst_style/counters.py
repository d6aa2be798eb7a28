"""The runner's counters, seen by a callback at each of its events."""

import torch
from catalyst import dl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

COUNTERS = [
    "epoch_step",
    "batch_step",
    "sample_step",
    "loader_batch_step",
    "loader_sample_step",
    "loader_batch_len",
    "batch_size",
    "num_epochs",
    "loader_key",
    "is_train_loader",
    "is_valid_loader",
    "is_infer_loader",
]


class Seen(dl.Callback):
    def __init__(self):
        super().__init__(order=dl.CallbackOrder.External)
        self.events = []

    def note(self, runner, event):
        self.events.append([event, *(getattr(runner, name) for name in COUNTERS)])

    def on_epoch_start(self, runner):
        self.events.append(["on_epoch_start", runner.epoch_step])

    def on_loader_start(self, runner):
        self.events.append(["on_loader_start", runner.loader_key, runner.loader_batch_len])

    def on_batch_start(self, runner):
        self.note(runner, "on_batch_start")

    def on_batch_end(self, runner):
        self.note(runner, "on_batch_end")

    def on_loader_end(self, runner):
        self.note(runner, "on_loader_end")

    def on_epoch_end(self, runner):
        self.note(runner, "on_epoch_end")


def main():
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(100, 8, generator=draw), torch.zeros(100, dtype=torch.int64))
    train, valid = torch.utils.data.Subset(data, range(70)), torch.utils.data.Subset(data, range(70, 100))
    model = nn.Linear(8, 4)
    seen = Seen()
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(train, batch_size=32), "valid": DataLoader(valid, batch_size=16)},
        callbacks=[seen],
        num_epochs=2,
    )
    return {f"{number:02d} {each[0]}": each[1:] for number, each in enumerate(seen.events)}
