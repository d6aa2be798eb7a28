"""Linear regression: one call of `train`, whose weights match the closed form."""

from typing import Any

import torch
from torch import nn

from runnerkit import dl


def main(**where: Any) -> dict[str, float]:
    """Train; return the validation error, that of predicting the mean, and the distance from least squares."""
    torch.manual_seed(0)
    features = torch.randn(1200, 8)
    targets = features @ torch.randn(8, 1) + 0.1 * torch.randn(1200, 1)
    model = nn.Linear(8, 1)
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loaders={
            "train": dl.TensorLoader(features[:1000], targets[:1000], batch_size=50, shuffle=True),
            "valid": dl.TensorLoader(features[1000:], targets[1000:], batch_size=50),
        },
        num_epochs=20,
        loggers={"console": None},
        **where,
    )
    exact = torch.linalg.lstsq(features[:1000], targets[:1000]).solution
    return {
        "mse": runner.epoch_metrics["valid"]["loss"],
        "mse_of_mean": (targets[1000:] - targets[:1000].mean()).square().mean().item(),
        "distance": (runner.model.weight.cpu() - exact.T).abs().max().item(),
    }


if __name__ == "__main__":
    learned = main()
    print("mse {mse:.4f} (predicting the mean: {mse_of_mean:.2f}), {distance:.4f} from least squares".format(**learned))
