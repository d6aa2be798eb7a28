"""Case b in PyTorch-Ignite: its supervised trainer and evaluator, with its metrics."""

from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch import nn

from benchmarks.cnn import work


def train(images: dict[str, work.Images]) -> work.Metrics:
    loaders, model, criterion = work.loaders(images), work.make_model(images), nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(
        model,
        work.make_optimizer(model),
        criterion,
        output_transform=lambda x, y, y_pred, loss: (y_pred.detach(), y),
    )
    for name, metric in {"loss": Loss(criterion), "accuracy": Accuracy()}.items():
        metric.attach(trainer, name)
    evaluator = create_supervised_evaluator(model, {"loss": Loss(criterion), "accuracy": Accuracy()})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(loaders["valid"]))
    trainer.run(loaders["train"], max_epochs=1)
    return {"train": trainer.state.metrics, "valid": evaluator.state.metrics}


if __name__ == "__main__":
    work.main(train)
