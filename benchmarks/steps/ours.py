"""Case a in runnerkit: SupervisedRunner or, without metrics, a runner with its own `handle_batch`."""

from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.steps import work
from runnerkit import dl


class Quiet(dl.Runner):
    """A runner without batch metrics, so that nothing is aggregated."""

    def handle_batch(self, batch: work.Batch) -> None:
        features, targets = batch
        self.optimizer.zero_grad()
        self.criterion(self.model(features), targets).backward()
        self.optimizer.step()


def train(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    model = work.make_model()
    more: dict[str, Any] = {"loggers": {"console": None}}
    if variant in ("accuracy", "log", "bar"):
        more["callbacks"] = [dl.AccuracyCallback("logits", "targets")]
    if variant == "log":
        more["log_every"] = work.LOG_EVERY
        more["loggers"] |= {
            "csv": dl.CSVLogger(folder, log_batch_metrics=True),
            "tensorboard": dl.TensorboardLogger(folder, log_batch_metrics=True),
        }
    runner = (Quiet if variant == "nothing" else dl.SupervisedRunner)().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=work.make_optimizer(model),
        loaders={"train": batches},
        verbose=variant == "bar",
        cpu=True,
        **more,
    )
    metrics = runner.epoch_metrics["train"]
    return work.Trained(model, metrics.get("loss"), metrics.get("accuracy"))


if __name__ == "__main__":
    work.main(train)
