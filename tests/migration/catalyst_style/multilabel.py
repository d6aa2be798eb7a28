"""Several labels for each sample; scores are made from logits by a callback."""

import torch
from catalyst import dl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(150, 8, generator=draw)
    targets = (features[:, :5] + torch.randn(150, 5, generator=draw) > 0).to(torch.float32)
    loader = DataLoader(TensorDataset(features, targets), batch_size=32)
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    runner = dl.SupervisedRunner(input_key="features", output_key="logits", target_key="targets", loss_key="loss")
    runner.train(
        model=model,
        criterion=nn.BCEWithLogitsLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loaders={"train": loader, "valid": loader},
        num_epochs=3,
        callbacks=[
            dl.BatchTransformCallback(
                transform=torch.sigmoid, scope="on_batch_end", input_key="logits", output_key="scores"
            ),
            dl.MultilabelAccuracyCallback(input_key="scores", target_key="targets", threshold=0.5),
            dl.BatchTransformCallback(
                transform=torch.round, scope="on_batch_end", input_key="scores", output_key="labels"
            ),
            dl.MultilabelPrecisionRecallF1SupportCallback(input_key="labels", target_key="targets", num_classes=5),
        ],
    )
    metrics = runner.epoch_metrics["valid"]
    return {name: metrics[name] for name in ("loss", "accuracy", "precision/_macro", "f1/_micro")}
