"""Embeddings trained with the hardest triplets, evaluated in every second epoch."""

import torch
from catalyst import dl
from catalyst.contrib.data import HardTripletsSampler
from catalyst.contrib.losses import TripletMarginLossWithSampler
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Labeled(Dataset):
    def __init__(self, is_query=None):
        draw = torch.Generator().manual_seed(0)
        self.labels = torch.arange(5).repeat(20)
        self.features = torch.randn(100, 8, generator=draw) + 2 * torch.randn(5, 8, generator=draw)[self.labels]
        self.is_query = is_query

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        row = {"features": self.features[index], "targets": self.labels[index]}
        return row if self.is_query is None else {**row, "is_query": index % 3 == 0}


class CustomRunner(dl.SupervisedRunner):
    def handle_batch(self, batch):
        if self.is_train_loader:
            features, targets = batch["features"].float(), batch["targets"].long()
            self.batch = {"embeddings": self.model(features), "targets": targets}
        else:
            features, targets, is_query = batch["features"].float(), batch["targets"].long(), batch["is_query"].bool()
            self.batch = {"embeddings": self.model(features), "targets": targets, "is_query": is_query}


def main():
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    criterion = TripletMarginLossWithSampler(margin=0.5, sampler_inbatch=HardTripletsSampler(norm_required=False))
    runner = CustomRunner(input_key="features", output_key="embeddings")
    runner.train(
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        loaders={"train": DataLoader(Labeled(), batch_size=25), "valid": DataLoader(Labeled(True), batch_size=30)},
        callbacks=[
            dl.ControlFlowCallbackWrapper(
                dl.CriterionCallback(input_key="embeddings", target_key="targets", metric_key="loss"),
                loaders="train",
            ),
            dl.ControlFlowCallbackWrapper(
                dl.CMCScoreCallback(
                    embeddings_key="embeddings", labels_key="targets", is_query_key="is_query", topk=(1, 3)
                ),
                loaders="valid",
            ),
            dl.PeriodicLoaderCallback(valid_loader_key="valid", valid_metric_key="cmc01", minimize=False, valid=2),
        ],
        num_epochs=4,
        valid_loader="valid",
        valid_metric="cmc01",
        minimize_valid_metric=False,
        logdir="logs/metric_learning",
    )
    metrics = runner.experiment_metrics
    return {
        **{f"loss {key}": each["train"]["loss"] for key, each in metrics.items()},
        **{f"{name} {key}": metrics[key]["valid"][name] for key in (2, 4) for name in ("cmc01", "cmc03")},
    }
