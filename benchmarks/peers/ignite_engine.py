"""Case a in PyTorch-Ignite: its supervised trainer, metrics and handlers."""

import csv
from pathlib import Path

from ignite.contrib.handlers import ProgressBar
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers.tensorboard_logger import TensorboardLogger
from ignite.metrics import Accuracy, Average
from torch import nn

from benchmarks.steps import work


def train(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    model = work.make_model()
    trainer = create_supervised_trainer(
        model,
        work.make_optimizer(model),
        nn.CrossEntropyLoss(),
        output_transform=lambda x, y, y_pred, loss: (
            y_pred,
            y,
            loss.detach(),
        ),  # the default copies the loss to the host
    )
    if variant != "nothing":
        Average(output_transform=lambda output: output[2]).attach(trainer, "loss")
    if variant not in ("nothing", "loss"):
        Accuracy(output_transform=lambda output: output[:2]).attach(trainer, "accuracy")
    if variant == "bar":
        ProgressBar().attach(trainer)
    if variant == "log":
        log_steps(trainer, folder)
    state = trainer.run(batches, max_epochs=1)
    return work.Trained(model, *(float(state.metrics[name]) for name in ("loss", "accuracy") if name in state.metrics))


def log_steps(trainer: Engine, folder: Path) -> None:
    """Log steps to CSV and TensorBoard; Ignite itself writes TensorBoard only."""
    file = (folder / "steps.csv").open("w", newline="")
    rows, events, every = csv.writer(file), TensorboardLogger(folder), Events.ITERATION_COMPLETED(every=work.LOG_EVERY)

    def scalars(engine: Engine) -> dict[str, float]:
        logits, targets, loss = engine.state.output
        return {"loss": loss.item(), "accuracy": work.num_right(logits, targets).item() / len(targets)}

    @trainer.on(every)
    def write_row(engine: Engine) -> None:
        rows.writerow([engine.state.iteration, *scalars(engine).values()])

    events.attach_output_handler(
        trainer, every, tag="train", output_transform=lambda output: scalars(trainer), global_step_transform=None
    )
    trainer.add_event_handler(Events.COMPLETED, lambda: (file.close(), events.close()))


if __name__ == "__main__":
    work.main(train)
