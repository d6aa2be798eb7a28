"""GAN: two models, two optimizers, and a custom order of backward passes in `handle_batch`."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from runnerkit import dl

MODES = torch.view_as_real(torch.polar(torch.ones(8), torch.arange(8) * math.pi / 4))
RADIUS = 0.15  # three standard deviations of the points around each mode


class GAN(dl.Runner):
    """A runner that steps the discriminator, then the generator, on the same fake points."""

    def handle_batch(self, batch: dict[str, Tensor]) -> None:
        real, generator, discriminator = batch["points"], self.model["generator"], self.model["discriminator"]
        fake = generator(torch.randn(len(real), 8, device=real.device))
        self.batch_metrics["near_a_mode"] = (torch.cdist(fake, MODES.to(fake)).amin(1) < RADIUS).float().mean()
        if self.is_train_loader:
            on_real, on_fake = discriminator(torch.cat([real, fake.detach()])).chunk(2)
            self.batch_metrics["discriminator_loss"] = loss = softplus(-on_real).mean() + softplus(on_fake).mean()
            self.learn(loss, optimizer="discriminator")
            self.batch_metrics["generator_loss"] = loss = softplus(-discriminator(fake)).mean()
            self.learn(loss, optimizer="generator")


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Build a network with two hidden layers."""
    hidden = [nn.Linear(num_inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(64, num_outputs))


def main(**where: Any) -> dict[str, float]:
    """Train on a ring of eight modes; return the share of generated points near a mode, and the modes reached."""
    torch.manual_seed(0)
    points = MODES[torch.randint(8, (5_000,))] + RADIUS / 3 * torch.randn(5_000, 2)
    model = {"generator": mlp(8, 2), "discriminator": mlp(2, 1)}
    runner = GAN(model)
    loader = dl.TensorLoader({"points": points}, batch_size=200, shuffle=True)
    before = runner.evaluate_loader(loader, engine=dl.CPUEngine())["near_a_mode"]
    runner.train(
        optimizer={key: torch.optim.Adam(each.parameters(), lr=3e-3, betas=(0.5, 0.9)) for key, each in model.items()},
        loaders={"train": loader, "valid": loader},
        num_epochs=40,
        loggers={"console": None},
        **where,
    )
    with torch.no_grad():
        distances = torch.cdist(runner.model["generator"].cpu()(torch.randn(2000, 8)), MODES)
    reached = distances.argmin(1)[distances.amin(1) < RADIUS].bincount(minlength=8) > 20
    return {"near": runner.epoch_metrics["valid"]["near_a_mode"], "near_before": before, "modes": int(reached.sum())}


if __name__ == "__main__":
    learned = main()
    print("{near:.1%} of the points near one of {modes} modes (untrained {near_before:.1%})".format(**learned))
