"""Stages: learn digits below five; then a new head on the frozen body for the others, of which few are known; then all."""

import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits


class Transfer(dl.IRunner):
    """Each stage has its data, its trainable part, its learning rate; the model goes on."""

    stages = ("pretrain", "freeze", "finetune")

    def get_stage_len(self, stage):
        return {"pretrain": 10, "freeze": 30, "finetune": 30}[stage]

    def get_loaders(self, stage):
        loaders = {}
        for key in ("train", "valid"):
            digits = Digits(train=key == "train")
            mine = (digits.targets < 5) == (stage == "pretrain")
            features, targets = digits.images[mine].flatten(1) / 255, digits.targets[mine] % 5
            if stage != "pretrain" and key == "train":
                features, targets = features[:100], targets[:100]
            loaders[key] = dl.TensorLoader(features, targets, batch_size=25, shuffle=key == "train")
        return loaders

    def get_model(self, stage):
        if stage == "pretrain":
            self.model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 5))
        elif stage == "freeze":
            self.model[1] = nn.Linear(64, 5)
        self.model[0].requires_grad_(stage != "freeze")
        return self.model

    def get_criterion(self, stage):
        return nn.CrossEntropyLoss()

    def get_optimizer(self, stage, model):
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def get_callbacks(self, stage):
        return {
            "criterion": dl.CriterionCallback("logits", "targets"),
            "backward": dl.BackwardCallback("loss"),
            "optimizer": dl.OptimizerCallback("loss"),
            "accuracy": dl.AccuracyCallback("logits", "targets"),
        }

    def handle_batch(self, batch):
        features, targets = batch
        self.batch = {"logits": self.model(features), "targets": targets}


def main(engine=None):
    """Run; return the valid accuracy that each stage began and ended with."""
    runner = Transfer(engine=engine).run()
    accuracy = {epoch: metrics["valid"]["accuracy"] for epoch, metrics in runner.experiment_metrics.items()}
    return {"pretrain": accuracy[10], "freeze": accuracy[40], "finetune": accuracy[70]}


if __name__ == "__main__":
    learned = main()
    print("five digits {pretrain:.1%}; of the others, head {freeze:.1%}, then all {finetune:.1%}".format(**learned))
