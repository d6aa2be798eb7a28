"""Case b in Lightning's Trainer."""

import warnings

import lightning
from torch import Tensor, nn

from benchmarks.cnn import work


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = model, nn.CrossEntropyLoss()

    def logged(self, key: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, targets = batch
        logits = self.model(features)
        loss = self.criterion(logits, targets)
        accuracy = (logits.argmax(dim=1) == targets).float().mean()
        self.log_dict({f"{key}_loss": loss, f"{key}_accuracy": accuracy}, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.logged("train", batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.logged("valid", batch)

    def configure_optimizers(self):
        return work.make_optimizer(self)


def train(images: dict[str, work.Images]) -> work.Metrics:
    loaders = work.loaders(images)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(work.make_model(images)), loaders["train"], loaders["valid"])
    means = trainer.callback_metrics
    return {key: {name: means[f"{key}_{name}"].item() for name in ("loss", "accuracy")} for key in loaders}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # advice about DataLoader workers
    work.main(train)
