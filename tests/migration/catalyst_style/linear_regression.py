"""Linear regression with `train`, `predict_batch` and `predict_loader`."""

import torch
from catalyst import dl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(96, 8, generator=draw)
    targets = features @ torch.randn(8, 1, generator=draw)
    loader = DataLoader(TensorDataset(features, targets), batch_size=20)
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    runner = dl.SupervisedRunner()
    runner.train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loaders={"train": loader, "valid": loader},
        callbacks=[dl.R2SquaredCallback(input_key="logits", target_key="targets")],
        logdir="logs/linear_regression",
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
        num_epochs=4,
        verbose=False,
        load_best_on_end=True,
    )
    values = {f"loss {key}": each["valid"]["loss"] for key, each in runner.experiment_metrics.items()}
    batch = runner.predict_batch({"features": features[:3]})["logits"]
    loaded = torch.cat([each["logits"] for each in runner.predict_loader(loader=loader)])
    return {**values, "batch": batch.sum().item(), "loader": loaded.sum().item(), "rows": len(loaded)}
