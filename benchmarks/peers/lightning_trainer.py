"""Case a in Lightning's Trainer, as commonly used, or with barebones=True, which logs nothing."""

import sys
import warnings
from pathlib import Path

import lightning
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from benchmarks.steps import work


class Module(lightning.LightningModule):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.model = work.make_model()
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: work.Batch, batch_idx: int) -> Tensor:
        features, targets = batch
        logits = self.model(features)
        loss = self.criterion(logits, targets)
        where = {"on_step": self.variant == "log", "on_epoch": True, "prog_bar": self.variant == "bar"}
        if self.variant != "nothing":
            self.log("loss", loss, **where)
        if self.variant not in ("nothing", "loss"):
            self.log("accuracy", work.num_right(logits, targets) / len(targets), **where)
        return loss

    def configure_optimizers(self):
        return work.make_optimizer(self)


def train(batches: work.Batches, variant: str, folder: Path, *, barebones: bool = False) -> work.Trained:
    module = Module(variant)
    if barebones:
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, barebones=True)
    else:
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=[CSVLogger(folder), TensorBoardLogger(folder)] if variant == "log" else False,
            log_every_n_steps=work.LOG_EVERY,
            enable_checkpointing=False,
            enable_progress_bar=variant == "bar",
            enable_model_summary=False,
        )
    trainer.fit(module, batches)
    means = {name: trainer.callback_metrics.get(f"{name}_epoch", trainer.callback_metrics.get(name)) for name in NAMES}
    return work.Trained(module.model, **{name: value.item() for name, value in means.items() if value is not None})


NAMES = ("loss", "accuracy")

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # advice about DataLoader workers
    if "--barebones" in sys.argv:
        sys.argv.remove("--barebones")
        work.main(lambda batches, variant, folder: train(batches, variant, folder, barebones=True))
    else:
        work.main(train)
