"""Stages: pretrain on digits below five, then on 100 images of the others train a new head, then all weights."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from runnerkit import dl
from runnerkit.contrib import Digits


class Transfer(dl.IRunner):
    """A runner whose stages have their own data, trainable weights and learning rates, but share the model."""

    model: nn.Sequential

    @property
    def stages(self) -> list[str]:
        return ["pretrain", "freeze", "finetune"]

    def get_stage_len(self, stage: str) -> int:
        return {"pretrain": 10, "freeze": 30, "finetune": 30}[stage]

    def get_loaders(self, stage: str) -> dict[str, dl.TensorLoader]:
        loaders = {}
        for key in ("train", "valid"):
            digits = Digits(train=key == "train")
            mine = (digits.targets < 5) == (stage == "pretrain")
            limit = 100 if stage != "pretrain" and key == "train" else None
            features, targets = digits.images[mine][:limit].flatten(1) / 255, digits.targets[mine][:limit] % 5
            loaders[key] = dl.TensorLoader(features, targets, batch_size=25, shuffle=key == "train")
        return loaders

    def get_model(self, stage: str) -> nn.Module:
        if stage == "pretrain":
            self.model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 5))
        elif stage == "freeze":
            self.model[1] = nn.Linear(64, 5)
        self.model[0].requires_grad_(stage != "freeze")
        return self.model

    def get_optimizer(self, stage: str, model: nn.Module) -> torch.optim.Optimizer:
        lr = 0.05 if stage == "freeze" else 0.01
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)

    def get_callbacks(self, stage: str) -> dict[str, dl.ICallback]:
        learning = {"backward": dl.BackwardCallback("loss"), "optimizer": dl.OptimizerCallback("loss")}
        return {**learning, "accuracy": dl.AccuracyCallback("logits", "targets")}

    def handle_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        features, targets = batch
        self.batch = {"logits": self.model(features), "targets": targets}
        self.batch_metrics["loss"] = cross_entropy(self.batch["logits"], targets)


def main(engine: dl.IEngine | None = None) -> dict[str, float]:
    """Run; return the validation accuracy at the end of each stage."""
    runner = Transfer(engine=engine).run()
    last = {"pretrain": 10, "freeze": 40, "finetune": 70}
    return {stage: runner.experiment_metrics[epoch]["valid"]["accuracy"] for stage, epoch in last.items()}


if __name__ == "__main__":
    learned = main()
    print("five digits {pretrain:.1%}; others: head only {freeze:.1%}, all weights {finetune:.1%}".format(**learned))
