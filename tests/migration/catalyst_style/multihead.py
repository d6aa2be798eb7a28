"""One body and two heads; the losses are added by a callback."""

import torch
from catalyst import dl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(8, 16)
        self.head1, self.head2 = nn.Linear(16, 3), nn.Linear(16, 5)

    def forward(self, x):
        x = self.shared(x).relu()
        return self.head1(x), self.head2(x)


class CustomRunner(dl.Runner):
    def handle_batch(self, batch):
        x, y1, y2 = batch
        y1_hat, y2_hat = self.model(x)
        self.batch = {"features": x, "logits1": y1_hat, "logits2": y2_hat, "targets1": y1, "targets2": y2}


def main():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(160, 8, generator=draw)
    data = TensorDataset(features, features[:, :3].argmax(dim=1), features[:, 3:].argmax(dim=1))
    loaders = {"train": DataLoader(data, batch_size=32), "valid": DataLoader(data, batch_size=32)}
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    runner = CustomRunner()
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        loaders=loaders,
        num_epochs=3,
        callbacks=[
            dl.CriterionCallback(metric_key="loss1", input_key="logits1", target_key="targets1"),
            dl.CriterionCallback(metric_key="loss2", input_key="logits2", target_key="targets2"),
            dl.MetricAggregationCallback(metric_key="loss", metrics=["loss1", "loss2"], mode="mean"),
            dl.BackwardCallback(metric_key="loss"),
            dl.OptimizerCallback(metric_key="loss"),
            dl.AccuracyCallback(input_key="logits1", target_key="targets1", prefix="one_"),
            dl.AccuracyCallback(input_key="logits2", target_key="targets2", topk=(1, 3), prefix="two_"),
        ],
    )
    metrics = runner.epoch_metrics["valid"]
    return {name: metrics[name] for name in ("loss1", "loss2", "loss", "one_accuracy01", "two_accuracy03")}
