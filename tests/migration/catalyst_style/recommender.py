"""Scores of items, with metrics of rankings."""

import torch
from catalyst import dl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(120, 8, generator=draw)
    targets = (features @ torch.randn(8, 10, generator=draw) > 2).to(torch.float32)
    loader = DataLoader(TensorDataset(features, targets), batch_size=32)
    torch.manual_seed(0)
    model = nn.Linear(8, 10)
    runner = dl.SupervisedRunner(input_key="features", output_key="logits", target_key="targets", loss_key="loss")
    runner.train(
        model=model,
        criterion=nn.BCEWithLogitsLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loaders={"train": loader, "valid": loader},
        num_epochs=3,
        callbacks=[
            dl.BatchTransformCallback(
                transform=torch.sigmoid, scope="on_batch_end", input_key="logits", output_key="scores"
            ),
            dl.CriterionCallback(input_key="logits", target_key="targets", metric_key="loss"),
            dl.HitrateCallback(input_key="scores", target_key="targets", topk=(1, 3)),
            dl.MRRCallback(input_key="scores", target_key="targets", topk=(1, 3)),
            dl.MAPCallback(input_key="scores", target_key="targets", topk=(1, 3)),
            dl.NDCGCallback(input_key="scores", target_key="targets", topk=(1, 3)),
            dl.BackwardCallback(metric_key="loss"),
            dl.OptimizerCallback(metric_key="loss"),
            dl.CheckpointCallback(
                logdir="logs/recommender", loader_key="valid", metric_key="loss", minimize=True, topk=1
            ),
        ],
    )
    metrics = runner.epoch_metrics["valid"]
    return {name: metrics[name] for name in ("loss", "hitrate03", "mrr03", "map03", "ndcg01", "ndcg03")}
