"""A runner made of hooks, with loggers, checkpoints and callbacks of its own."""

import torch
from catalyst import dl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CustomRunner(dl.IRunner):
    def __init__(self, logdir):
        super().__init__()
        self._logdir = logdir
        self.seen = []

    def get_engine(self):
        return dl.CPUEngine()

    def get_loggers(self):
        return {
            "console": dl.ConsoleLogger(),
            "csv": dl.CSVLogger(logdir=self._logdir),
            "tensorboard": dl.TensorboardLogger(logdir=self._logdir),
        }

    @property
    def num_epochs(self):
        return 2

    def get_loaders(self):
        draw = torch.Generator().manual_seed(0)
        features = torch.randn(100, 8, generator=draw)
        data = TensorDataset(features, features[:, :4].argmax(dim=1))
        return {"train": DataLoader(data, batch_size=32), "valid": DataLoader(data, batch_size=32)}

    def get_model(self):
        torch.manual_seed(0)
        return nn.Linear(8, 4)

    def get_criterion(self):
        return nn.CrossEntropyLoss()

    def get_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.02)

    def get_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def get_callbacks(self):
        return {
            "criterion": dl.CriterionCallback(metric_key="loss", input_key="logits", target_key="targets"),
            "backward": dl.BackwardCallback(metric_key="loss"),
            "optimizer": dl.OptimizerCallback(metric_key="loss"),
            "scheduler": dl.SchedulerCallback(),
            "accuracy": dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1, 3)),
            "checkpoint": dl.CheckpointCallback(
                self._logdir, loader_key="valid", metric_key="accuracy01", minimize=False
            ),
        }

    def handle_batch(self, batch):
        x, y = batch
        self.batch = {"features": x, "targets": y, "logits": self.model(x)}

    def on_epoch_end(self, runner):
        super().on_epoch_end(runner)
        self.seen.append(self.epoch_metrics["valid"]["loss"])


def main():
    runner = CustomRunner("logs/config_less")
    runner.run()
    metrics = runner.epoch_metrics["valid"]
    return {"loss": metrics["loss"], "accuracy03": metrics["accuracy03"], **dict(zip("ab", runner.seen, strict=True))}
