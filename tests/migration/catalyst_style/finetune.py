"""The head is trained first, then the whole model at another learning rate."""

import torch
from catalyst import dl, utils
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(120, 8, generator=draw)
    loader = DataLoader(TensorDataset(features, features[:, :4].argmax(dim=1)), batch_size=32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    values = {}
    for is_frozen, lr in ((True, 0.05), (False, 0.01)):
        utils.set_requires_grad(model[0], not is_frozen)
        runner = dl.SupervisedRunner()
        runner.train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.Adam((each for each in model.parameters() if each.requires_grad), lr=lr),
            loaders={"train": loader, "valid": loader},
            callbacks=[
                dl.AccuracyCallback("logits", "targets", topk=(1,)),
                dl.EarlyStoppingCallback(patience=2, loader_key="valid", metric_key="loss", minimize=True),
            ],
            logdir=f"logs/finetune_{is_frozen}",
            num_epochs=2,
            valid_loader="valid",
            valid_metric="loss",
            minimize_valid_metric=True,
            load_best_on_end=True,
        )
        values[f"loss {is_frozen}"] = runner.epoch_metrics["valid"]["loss"]
        values[f"body {is_frozen}"] = model[0].weight.sum().item()
    return values
