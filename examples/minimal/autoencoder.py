"""Autoencoder: the features are their own targets."""

from typing import Any

import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits

NUM_CODES = 8


def main(**where: Any) -> dict[str, float]:
    """Train; return the validation error, and those of the mean image and of equally many principal components."""
    torch.manual_seed(0)
    train, valid = (Digits(train=train).images.flatten(1) / 255 for train in (True, False))
    model = nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, NUM_CODES)),
        nn.Sequential(nn.Linear(NUM_CODES, 64), nn.ReLU(), nn.Linear(64, 64)),
    )
    runner = dl.SupervisedRunner(output_key="restored", target_key="features").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.005),
        loaders={
            "train": dl.TensorLoader({"features": train}, batch_size=64, shuffle=True),
            "valid": dl.TensorLoader({"features": valid}, batch_size=64),
        },
        num_epochs=40,
        loggers={"console": None},
        **where,
    )
    mean = train.mean(dim=0)
    components = torch.linalg.svd(train - mean, full_matrices=False).Vh[:NUM_CODES]
    return {
        "mse": runner.epoch_metrics["valid"]["loss"],
        "mse_of_mean": (valid - mean).square().mean().item(),
        "mse_of_pca": ((valid - mean) @ components.T @ components - (valid - mean)).square().mean().item(),
    }


if __name__ == "__main__":
    learned = main()
    print("mse {mse:.4f} (mean image {mse_of_mean:.4f}, 8 principal components {mse_of_pca:.4f})".format(**learned))
