"""Two criteria by key: quantile losses for the ends of an interval that contains 80 % of the targets."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runnerkit import dl


def pinball(output: Tensor, target: Tensor, quantile: float) -> Tensor:
    """Compute the loss that is minimal at the `quantile` of the targets (N, 1)."""
    return torch.maximum(quantile * (target - output), (quantile - 1) * (target - output)).mean()


class Interval(nn.Module):
    """A network that predicts both ends of the interval."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        return torch.chunk(self.body(features), 2, dim=1)


def main(**where: Any) -> dict[str, float]:
    """Train; return the shares of validation targets below and above, and the widths for small and large noise."""
    torch.manual_seed(0)
    features = torch.rand(6000, 1)
    targets = features + features * torch.randn(6000, 1)
    train, valid = ({"features": features[part], "targets": targets[part]} for part in (slice(5000), slice(5000, None)))
    model = Interval()
    runner = dl.SupervisedRunner(output_key=["low", "high"]).train(
        model=model,
        criterion={"low": partial(pinball, quantile=0.1), "high": partial(pinball, quantile=0.9)},
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders={"train": dl.TensorLoader(train, batch_size=100, shuffle=True)},
        callbacks=[
            dl.CriterionCallback("low", "targets", metric_key="low_loss", criterion_key="low"),
            dl.CriterionCallback("high", "targets", metric_key="high_loss", criterion_key="high"),
            dl.MetricAggregationCallback("loss", ["low_loss", "high_loss"], reduction="sum"),
        ],
        num_epochs=10,
        loggers={"console": None},
        **where,
    )
    with torch.no_grad():
        low, high = runner.model.cpu()(valid["features"])
    return {
        "below": (valid["targets"] < low).float().mean().item(),
        "above": (valid["targets"] > high).float().mean().item(),
        "narrow": (high - low)[valid["features"] < 0.2].mean().item(),
        "wide": (high - low)[valid["features"] > 0.8].mean().item(),
    }


if __name__ == "__main__":
    learned = main()
    print("{below:.1%} below, {above:.1%} above; width {narrow:.2f} (low noise), {wide:.2f} (high)".format(**learned))
