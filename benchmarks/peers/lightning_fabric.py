"""Case a in Lightning Fabric: the hand-written loop with Lightning Fabric's model, optimizer and backward."""

from pathlib import Path

from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

from benchmarks.steps import raw, work


def train(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    loggers = [CSVLogger(folder), TensorBoardLogger(folder)] if variant == "log" else None
    fabric = Fabric(accelerator="cpu", devices=1, loggers=loggers)
    module = work.make_model()
    model, optimizer = fabric.setup(module, work.make_optimizer(module))
    trained = raw.loop(
        batches,
        variant,
        model=model,
        optimizer=optimizer,
        backward=fabric.backward,
        log=(lambda step, scalars: fabric.log_dict(scalars, step=step)) if variant == "log" else None,
    )
    for logger in loggers or []:
        logger.finalize("success")
    return trained._replace(model=module)


if __name__ == "__main__":
    work.main(train)
