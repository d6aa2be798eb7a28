"""Classification with the usual metrics and a schedule."""

import torch
from catalyst import dl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 4


def main():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(210, 8, generator=draw)
    targets = (features[:, :NUM_CLASSES] + torch.randn(210, NUM_CLASSES, generator=draw)).argmax(dim=1)
    loader = DataLoader(TensorDataset(features, targets), batch_size=32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    runner = dl.SupervisedRunner(input_key="features", output_key="logits", target_key="targets", loss_key="loss")
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [2]),
        loaders={"train": loader, "valid": loader},
        num_epochs=3,
        callbacks=[
            dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1, 3)),
            dl.PrecisionRecallF1SupportCallback(input_key="logits", target_key="targets", num_classes=NUM_CLASSES),
            dl.ConfusionMatrixCallback(input_key="logits", target_key="targets", num_classes=NUM_CLASSES),
            dl.SchedulerCallback(),
        ],
        logdir="logs/multiclass",
        valid_loader="valid",
        valid_metric="accuracy03",
        minimize_valid_metric=False,
    )
    metrics = runner.epoch_metrics["valid"]
    names = ["loss", "accuracy01", "accuracy03", "precision/_macro", "recall/_micro", "f1/_weighted"]
    return {name: metrics[name] for name in names}
