"""A variational autoencoder: losses of a custom `handle_batch`, averaged by metric objects."""

import torch
from catalyst import dl, metrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    noise = torch.Generator().manual_seed(1)

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(2, 8)

    def forward(self, x):
        loc, log_scale = self.encoder(x).chunk(2, dim=1)
        z = loc + torch.randn(loc.shape, generator=self.noise) * log_scale.exp()
        return self.decoder(z), loc, log_scale


class CustomRunner(dl.IRunner):
    def get_engine(self):
        return dl.CPUEngine()

    def get_loggers(self):
        return {"console": dl.ConsoleLogger()}

    @property
    def num_epochs(self):
        return 3

    def get_loaders(self):
        draw = torch.Generator().manual_seed(0)
        loader = DataLoader(TensorDataset(torch.randn(90, 8, generator=draw)), batch_size=32)
        return {"train": loader, "valid": loader}

    def get_model(self):
        torch.manual_seed(0)
        return VAE()

    def get_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.02)

    def get_callbacks(self):
        return {"backward": dl.BackwardCallback("loss"), "optimizer": dl.OptimizerCallback("loss")}

    def on_loader_start(self, runner):
        super().on_loader_start(runner)
        self.meters = {key: metrics.AdditiveMetric(compute_on_call=False) for key in ("loss", "mae", "kld")}

    def handle_batch(self, batch):
        (x,) = batch
        x_hat, loc, log_scale = self.model(x)
        mae = F.l1_loss(x_hat, x)
        kld = (-0.5 * (1 + 2 * log_scale - loc**2 - (2 * log_scale).exp())).mean()
        self.batch_metrics.update({"loss": mae + 0.1 * kld, "mae": mae, "kld": kld})
        for key, meter in self.meters.items():
            meter.update(self.batch_metrics[key].item(), self.batch_size)

    def on_loader_end(self, runner):
        for key, meter in self.meters.items():
            self.loader_metrics[key] = meter.compute()[0]
        super().on_loader_end(runner)


def main():
    runner = CustomRunner()
    runner.run()
    return {name: runner.epoch_metrics["valid"][name] for name in ("loss", "mae", "kld")}
