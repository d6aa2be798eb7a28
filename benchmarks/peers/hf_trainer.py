"""Case a in transformers' Trainer, which always aggregates the loss; training accuracy is up to the user."""

import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.steps import work


class WithLoss(nn.Module):
    """The model interface that Trainer expects."""

    def __init__(self, model: nn.Module, *, counts_hits: bool) -> None:
        super().__init__()
        self.model, self.criterion = model, nn.CrossEntropyLoss()
        self.counts_hits, self.hits, self.num_samples = counts_hits, torch.zeros((), dtype=torch.int64), 0

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(features)
        if self.counts_hits:
            self.hits += work.num_right(logits, labels)
            self.num_samples += len(labels)
        return {"loss": self.criterion(logits, labels), "logits": logits}


class ReadyBatches(Trainer):
    def get_train_dataloader(self) -> Any:
        return self.train_dataset


class WriteRows(TrainerCallback):
    """A callback that writes CSV; Trainer itself writes TensorBoard only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.file = self.path.open("w", newline="")
        self.rows = csv.writer(self.file)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.rows.writerow([state.global_step, *logs.values()])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.file.close()


def train(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    model = work.make_model()
    module = WithLoss(model, counts_hits=variant not in ("nothing", "loss"))
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=batches.batch_size,
        max_grad_norm=0.0,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="steps" if variant == "log" else "no",
        logging_steps=work.LOG_EVERY,
        report_to="tensorboard" if variant == "log" else "none",
        disable_tqdm=variant != "bar",
    )
    optimizer = work.make_optimizer(module)
    trainer = ReadyBatches(
        model=module,
        args=arguments,
        train_dataset=batches.mapped(lambda batch: {"features": batch[0], "labels": batch[1]}),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        callbacks=[WriteRows(folder / "steps.csv")] if variant == "log" else None,
    )
    loss = trainer.train().training_loss
    if variant == "nothing":
        return work.Trained(model)
    return work.Trained(model, loss, module.hits.item() / module.num_samples if module.counts_hits else None)


if __name__ == "__main__":
    work.main(train)
