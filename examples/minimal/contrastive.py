"""Contrastive learning: two encoders that match the halves of an image among all halves."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from runnerkit import dl
from runnerkit.contrib import Digits


class ContrastiveRunner(dl.Runner):
    """Cross-entropy over a batch's similarities, both ways (InfoNCE, arXiv:1807.03748, as in arXiv:2103.00020)."""

    def handle_batch(self, batch: dict[str, Tensor]) -> None:
        left, right = (normalize(self.model[side](batch[side]), dim=1) for side in ("left", "right"))
        similarities, own = left @ right.T / 0.1, torch.arange(len(left), device=left.device)
        self.batch_metrics["loss"] = (cross_entropy(similarities, own) + cross_entropy(similarities.T, own)) / 2
        # Left halves are queries, right halves the gallery; the label is the image index.
        self.batch = {
            "embeddings": torch.cat([left, right]),
            "images": batch["image"].repeat(2),
            "is_query": torch.arange(2 * len(left), device=left.device) < len(left),
        }


def loader(train: bool) -> dl.TensorLoader:
    """Load the left and right halves of digits, each 8 x 4 pixels."""
    pixels = Digits(train=train).images / 255
    halves = {"left": pixels[:, :, :4].flatten(1), "right": pixels[:, :, 4:].flatten(1)}
    return dl.TensorLoader({**halves, "image": torch.arange(len(pixels))}, batch_size=120, shuffle=train)


def main(**where: Any) -> dict[str, float]:
    """Train; return recall at 1 and 10 among all validation images, and the chance level."""
    torch.manual_seed(0)
    model = {side: nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for side in ("left", "right")}
    loaders = {"train": loader(train=True), "valid": loader(train=False)}
    cmc = dl.CMCScoreCallback("embeddings", "images", "is_query", topk=(1, 10))
    optimizers = [dl.OptimizerCallback("loss", model_key=side, optimizer_key=side) for side in model]
    runner = ContrastiveRunner().train(
        model=model,
        optimizer={side: torch.optim.Adam(each.parameters(), lr=0.003) for side, each in model.items()},
        loaders=loaders,
        callbacks=[dl.BackwardCallback("loss"), *optimizers, dl.ControlFlowCallback(cmc, loaders="valid")],
        num_epochs=30,
        loggers={"console": None},
        **where,
    )
    metrics = runner.epoch_metrics["valid"]
    return {"recall01": metrics["cmc01"], "recall10": metrics["cmc10"], "chance": 1 / len(loaders["valid"].dataset)}


if __name__ == "__main__":
    learned = main()
    print("recall@1 {recall01:.1%} (chance {chance:.1%}), recall@10 {recall10:.1%}".format(**learned))
