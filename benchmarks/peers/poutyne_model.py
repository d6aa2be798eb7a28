"""Case a in Poutyne: Model.fit_generator, which always aggregates the loss.

With step logging, Poutyne writes every step to CSV and only epochs to TensorBoard; it has no other interval.
"""

import sys
from contextlib import redirect_stdout
from pathlib import Path

from poutyne import CSVLogger, Model, TensorBoardLogger
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from benchmarks.steps import work


def train(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    network = work.make_model()
    metrics = ["accuracy"] if variant not in ("nothing", "loss") else []
    model = Model(network, work.make_optimizer(network), nn.CrossEntropyLoss(), batch_metrics=metrics)
    callbacks = []
    if variant == "log":
        callbacks = [
            CSVLogger(str(folder / "steps.csv"), batch_granularity=True),
            TensorBoardLogger(SummaryWriter(folder)),
        ]
    with redirect_stdout(sys.stderr):  # keeps the bar off stdout
        (epoch,) = model.fit_generator(batches, epochs=1, verbose=variant == "bar", callbacks=callbacks)
    if variant == "nothing":
        return work.Trained(network)
    return work.Trained(network, epoch["loss"], epoch["acc"] / 100 if "acc" in epoch else None)


if __name__ == "__main__":
    work.main(train)
