"""Variational autoencoder: `handle_batch` computes two losses, logged separately, and trains on their sum."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from runnerkit import dl
from runnerkit.contrib import Digits


class VAE(nn.Module):
    """A network that returns pixel logits, and mean and log variance of the codes."""

    def __init__(self, num_codes: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * num_codes))
        self.decoder = nn.Sequential(nn.Linear(num_codes, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        codes = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(codes), mean, log_variance


class VAERunner(dl.Runner):
    """A runner that minimizes the negative evidence lower bound, in nats per image."""

    def handle_batch(self, batch: dict[str, Tensor]) -> None:
        logits, mean, log_variance = self.model(batch["pixels"])
        reconstruction = binary_cross_entropy_with_logits(logits, batch["pixels"], reduction="none").sum(1).mean()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()
        self.batch_metrics = {"reconstruction": reconstruction, "divergence": divergence}
        self.batch_metrics["loss"] = reconstruction + divergence


def main(**where: Any) -> dict[str, float]:
    """Train; return the validation losses, and that of the mean image, which needs no code."""
    torch.manual_seed(0)
    train, valid = (Digits(train=train).images.flatten(1) / 255 for train in (True, False))
    model = VAE()
    runner = VAERunner().train(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.003),
        loaders={
            "train": dl.TensorLoader({"pixels": train}, batch_size=64, shuffle=True),
            "valid": dl.TensorLoader({"pixels": valid}, batch_size=64),
        },
        callbacks=[dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")],
        num_epochs=40,
        loggers={"console": None},
        **where,
    )
    mean_image = train.mean(dim=0).clamp(1e-3, 1 - 1e-3).expand_as(valid)
    of_mean_image = binary_cross_entropy(mean_image, valid, reduction="none").sum(1).mean().item()
    return {**runner.epoch_metrics["valid"], "loss_of_mean_image": of_mean_image}


if __name__ == "__main__":
    learned = main()
    print(
        "{loss:.2f} nats, {divergence:.2f} of them in the code; mean image {loss_of_mean_image:.2f}".format(**learned)
    )
