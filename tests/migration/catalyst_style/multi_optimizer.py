"""Two models with an optimizer and a schedule each."""

import torch
from catalyst import dl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CustomRunner(dl.Runner):
    def handle_batch(self, batch):
        x, y = batch
        logits = self.model["head"](self.model["encoder"](x))
        loss = self.criterion(logits, y)
        self.batch_metrics.update({"loss": loss})
        self.batch = {"logits": logits, "targets": y}


def main():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(128, 8, generator=draw)
    loader = DataLoader(TensorDataset(features, features[:, :4].argmax(dim=1)), batch_size=32)
    torch.manual_seed(0)
    model = {"encoder": nn.Linear(8, 16), "head": nn.Linear(16, 4)}
    optimizer = {
        "encoder": torch.optim.Adam(model["encoder"].parameters(), lr=0.02),
        "head": torch.optim.SGD(model["head"].parameters(), lr=0.1),
    }
    scheduler = {key: torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.5) for key, each in optimizer.items()}
    runner = CustomRunner()
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=scheduler,
        loaders={"train": loader, "valid": loader},
        num_epochs=3,
        callbacks=[
            dl.BackwardCallback("loss"),
            dl.OptimizerCallback("loss", optimizer_key="encoder"),
            dl.OptimizerCallback("loss", optimizer_key="head"),
            dl.SchedulerCallback(scheduler_key="encoder"),
            dl.SchedulerCallback(scheduler_key="head"),
            dl.AccuracyCallback("logits", "targets", topk=(1,)),
        ],
    )
    metrics = runner.epoch_metrics["valid"]
    return {
        "accuracy01": metrics["accuracy01"],
        "encoder": model["encoder"].weight.sum().item(),
        "head": model["head"].weight.sum().item(),
        "lr": optimizer["encoder"].param_groups[0]["lr"],
    }
