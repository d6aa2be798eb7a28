"""Two augmentations of each sample, brought together by a contrastive loss."""

import torch
from catalyst import dl
from catalyst.data import SelfSupervisedDatasetWrapper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.projection = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return nn.functional.normalize(self.projection(self.encoder(x).relu()), dim=1)


class Contrastive(nn.Module):
    def forward(self, left, right):
        return nn.functional.cross_entropy(left @ right.T / 0.5, torch.arange(len(left)))


class CustomRunner(dl.Runner):
    def handle_batch(self, batch):
        _, left, right, _ = batch
        self.batch = {"projection_left": self.model(left), "projection_right": self.model(right)}


def main():
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(80, 8, generator=draw), torch.zeros(80))
    wrapped = SelfSupervisedDatasetWrapper(
        data,
        transform_left=lambda x: x * 1.1,
        transform_right=lambda x: x.roll(1),
        is_target=True,
    )
    torch.manual_seed(0)
    model = Model()
    runner = CustomRunner()
    runner.train(
        model=model,
        criterion=Contrastive(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loaders={"train": DataLoader(wrapped, batch_size=20)},
        callbacks=[
            dl.CriterionCallback(input_key="projection_left", target_key="projection_right", metric_key="loss"),
            dl.BackwardCallback(metric_key="loss"),
            dl.OptimizerCallback(metric_key="loss"),
        ],
        num_epochs=3,
    )
    return {f"loss {key}": each["train"]["loss"] for key, each in runner.experiment_metrics.items()}
