"""Case b in Poutyne: Model.fit_generator."""

from poutyne import Model
from torch import nn

from benchmarks.cnn import work


def train(images: dict[str, work.Images]) -> work.Metrics:
    loaders, network = work.loaders(images), work.make_model(images)
    model = Model(network, work.make_optimizer(network), nn.CrossEntropyLoss(), batch_metrics=["accuracy"])
    (epoch,) = model.fit_generator(loaders["train"], loaders["valid"], epochs=1, verbose=False)
    return {
        "train": {"loss": epoch["loss"], "accuracy": epoch["acc"] / 100},
        "valid": {"loss": epoch["val_loss"], "accuracy": epoch["val_acc"] / 100},
    }


if __name__ == "__main__":
    work.main(train)
