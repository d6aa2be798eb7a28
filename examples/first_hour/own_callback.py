"""Write a metric that is exact over the whole loader, and a callback that ends the run when it is good enough.

python examples/first_hour/own_callback.py
"""

from typing import Any

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from runnerkit import dl, metrics


class RMSE(metrics.SumsMetric):
    """The root of a mean, which is not the mean of the batches' roots."""

    def count(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        errors = outputs.detach().double() - targets
        return {"squares": errors.square().sum(), "number": errors.numel()}

    def values(self, sums: dict[str, Any]) -> dict[str, Any]:
        return {"rmse": (sums["squares"] / sums["number"]).sqrt()}


class GoodEnough(dl.Callback):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def on_epoch_end(self, runner: dl.IRunner) -> None:
        if runner.epoch_metrics["valid"]["rmse"] < self.limit:
            runner.need_early_stop = True


torch.manual_seed(0)
rows, progress = (torch.tensor(each, dtype=torch.float32) for each in load_diabetes(return_X_y=True))
rows, progress = rows / rows.std(dim=0), (progress - progress.mean())[:, None] / progress.std()
runner = dl.SupervisedRunner().train(
    model=nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)),
    criterion=nn.MSELoss(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    loaders={
        "train": dl.TensorLoader(rows[:300], progress[:300], batch_size=32, shuffle=True),
        "valid": dl.TensorLoader(rows[300:], progress[300:], batch_size=32),
    },
    callbacks=[dl.LoaderMetricCallback(RMSE(["rmse"])), GoodEnough(limit=0.75)],
    num_epochs=50,
)
rmse = runner.epoch_metrics["valid"]["rmse"]
print(f"error {rmse:.3f} standard deviations after {runner.epoch_step} of 50 epochs, which is good enough")
