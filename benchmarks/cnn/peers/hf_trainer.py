"""Case b in transformers' Trainer, which creates the DataLoaders; training accuracy is up to the user."""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments

from benchmarks.cnn import work


class WithLoss(nn.Module):
    """The model interface that Trainer expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion, self.trained = model, nn.CrossEntropyLoss(), work.Sums()

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(features)
        loss = self.criterion(logits, labels)
        if self.training:
            self.trained.add(loss, logits, labels)
        return {"loss": loss, "logits": logits}


def as_dict(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return dict(zip(("features", "labels"), default_collate(samples), strict=True))


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(axis=1) == prediction.label_ids).mean().item()}


def train(images: dict[str, work.Images]) -> work.Metrics:
    module = WithLoss(work.make_model(images))
    optimizer = work.make_optimizer(module)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=work.BATCH_SIZE,
            per_device_eval_batch_size=work.BATCH_SIZE,
            max_grad_norm=0.0,
            use_cpu=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=module,
            args=arguments,
            data_collator=as_dict,
            train_dataset=images["train"],
            eval_dataset=images["valid"],
            compute_metrics=accuracy,
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        )
        loss = trainer.train().training_loss
        valid = trainer.evaluate()
    return {
        "train": {"loss": loss, "accuracy": module.trained.means()["accuracy"]},
        "valid": {"loss": valid["eval_loss"], "accuracy": valid["eval_accuracy"]},
    }


if __name__ == "__main__":
    work.main(train)
