"""A generator against a discriminator, with two criteria and two optimizers."""

import torch
from catalyst import dl
from catalyst.contrib.layers import Lambda
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CustomRunner(dl.Runner):
    noise = torch.Generator().manual_seed(1)

    def predict_batch(self, batch):
        return self.model["generator"](torch.randn(len(batch), 4, generator=self.noise))

    def handle_batch(self, batch):
        (real,) = batch
        fake = self.model["generator"](torch.randn(len(real), 4, generator=self.noise))
        self.batch = {
            "fake_predictions": self.model["discriminator"](fake),
            "labels_one": torch.ones(len(real), 1),
            "both_predictions": self.model["discriminator"](torch.cat([fake.detach(), real])),
            "labels_both": torch.cat([torch.zeros(len(real), 1), torch.ones(len(real), 1)]),
        }


def main():
    draw = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(96, 6, generator=draw) + 2), batch_size=32)
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(4, 6), Lambda(lambda x: 2 * x)),
            "discriminator": nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        }
    )
    criterion = {"generator": nn.BCEWithLogitsLoss(), "discriminator": nn.BCEWithLogitsLoss()}
    optimizer = {key: torch.optim.Adam(each.parameters(), lr=0.01) for key, each in model.items()}
    runner = CustomRunner()
    runner.train(
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        loaders={"train": loader},
        callbacks=[
            dl.CriterionCallback(
                input_key="both_predictions",
                target_key="labels_both",
                metric_key="loss_discriminator",
                criterion_key="discriminator",
            ),
            dl.CriterionCallback(
                input_key="fake_predictions",
                target_key="labels_one",
                metric_key="loss_generator",
                criterion_key="generator",
            ),
            dl.BackwardCallback(metric_key="loss_generator"),
            dl.OptimizerCallback(optimizer_key="generator", metric_key="loss_generator"),
            dl.BackwardCallback(metric_key="loss_discriminator"),
            dl.OptimizerCallback(optimizer_key="discriminator", metric_key="loss_discriminator"),
        ],
        num_epochs=3,
        verbose=False,
    )
    metrics = runner.epoch_metrics["train"]
    generated = runner.predict_batch(torch.zeros(2))
    return {**{name: metrics[name] for name in ("loss_generator", "loss_discriminator")}, "sum": generated.sum().item()}
