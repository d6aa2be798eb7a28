"""Case a in Catalyst: SupervisedRunner or, without metrics, a runner with its own `handle_batch`."""

from pathlib import Path
from typing import Any

from accelerate.state import DistributedType
from catalyst import dl
from torch import nn

from benchmarks.steps import work


class Quiet(dl.Runner):
    def handle_batch(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.engine.backward(self.criterion(self.model(batch[0]), batch[1]))
        self.optimizer.step()


class Loader(work.Batches):
    """Prepared batches with the DataLoader attributes that Catalyst reads."""

    batch_sampler = sampler = None

    def __init__(self, batches: work.Batches) -> None:
        super().__init__(batches.batches, batches.turns)
        self.times = batches.times
        self.dataset = range(self.batch_size * len(batches))


def train(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    model = work.make_model()
    more: dict[str, Any] = {}
    if variant in ("accuracy", "log", "bar"):
        more["callbacks"] = [dl.AccuracyCallback("logits", "targets", topk=(1,))]
    if variant == "log":
        more["loggers"] = {
            "csv": dl.CSVLogger(str(folder)),  # epochs only; it does not write steps
            "tensorboard": dl.TensorboardLogger(str(folder), log_batch_metrics=True),  # every step or none
        }
    runner = (Quiet if variant == "nothing" else dl.SupervisedRunner)()
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=work.make_optimizer(model),
        loaders={"train": Loader(batches)},
        engine=dl.CPUEngine(),
        verbose=variant == "bar",
        **more,
    )
    metrics = runner.epoch_metrics["train"]
    return work.Trained(model, metrics.get("loss"), metrics.get("accuracy01"))


if __name__ == "__main__":
    DistributedType.TPU = DistributedType.XLA  # Accelerate has renamed it since
    work.main(train)
