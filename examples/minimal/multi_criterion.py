"""Two criteria by key: quantile losses, whose minima are the two ends of an interval that holds 80 % of the targets."""

import torch
from torch import nn

from runnerkit import dl


def pinball(quantile):
    """Make the loss whose minimum is `quantile`: outputs and targets (N, 1)."""

    def loss(output, target):
        return torch.maximum(quantile * (target - output), (quantile - 1) * (target - output)).mean()

    return loss


class Interval(nn.Module):
    """Give two ends for each feature."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, features):
        return self.body(features).chunk(2, dim=1)


def main(**where):
    """Train; return the share of valid targets below, within and above, and the widths where noise is small and large."""
    torch.manual_seed(0)
    features = torch.rand(6000, 1)
    targets = features + features * torch.randn(6000, 1)
    train, valid = ({"features": features[part], "targets": targets[part]} for part in (slice(5000), slice(5000, None)))
    model = Interval()
    runner = dl.SupervisedRunner(output_key=["low", "high"]).train(
        model=model,
        criterion={"low": pinball(0.1), "high": pinball(0.9)},
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders={
            "train": dl.TensorLoader(train, batch_size=100, shuffle=True),
            "valid": dl.TensorLoader(valid, batch_size=1000),
        },
        callbacks=[
            dl.CriterionCallback("low", "targets", metric_key="low_loss", criterion_key="low"),
            dl.CriterionCallback("high", "targets", metric_key="high_loss", criterion_key="high"),
            dl.MetricAggregationCallback("loss", ["low_loss", "high_loss"], mode="sum"),
        ],
        num_epochs=10,
        loggers={"console": None},
        **where,
    )
    with torch.no_grad():
        low, high = runner.model(valid["features"])
        width = (high - low)[:, 0]
    return {
        "below": (valid["targets"] < low).float().mean().item(),
        "above": (valid["targets"] > high).float().mean().item(),
        "narrow": width[valid["features"][:, 0] < 0.2].mean().item(),
        "wide": width[valid["features"][:, 0] > 0.8].mean().item(),
    }


if __name__ == "__main__":
    learned = main()
    print("{below:.1%} below, {above:.1%} above; width {narrow:.2f} to {wide:.2f}, as the noise".format(**learned))
