"""Case b in Catalyst: SupervisedRunner."""

from accelerate.state import DistributedType
from catalyst import dl
from torch import nn

from benchmarks.cnn import work


def train(images: dict[str, work.Images]) -> work.Metrics:
    model, runner = work.make_model(images), dl.SupervisedRunner()
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=work.make_optimizer(model),
        loaders=work.loaders(images),
        callbacks=[dl.AccuracyCallback("logits", "targets", topk=(1,))],
        engine=dl.CPUEngine(),
    )
    means = runner.epoch_metrics
    return {key: {"loss": means[key]["loss"], "accuracy": means[key]["accuracy01"]} for key in ("train", "valid")}


if __name__ == "__main__":
    DistributedType.TPU = DistributedType.XLA  # Accelerate has renamed it since
    work.main(train)
