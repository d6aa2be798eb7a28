"""Segmentation of discs and squares, with `IOUCallback` and `DiceCallback` on masks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from runnerkit import dl


def conv(num_inputs: int, num_outputs: int, stride: int = 1) -> nn.Sequential:
    """Build a convolution with batch norm and ReLU."""
    conv = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(num_outputs), nn.ReLU())


class Coarser(nn.Sequential):
    """A level of a U-Net (arXiv:1505.04597): concatenates the input and its layers' output at half the size."""

    def forward(self, input: Tensor) -> Tensor:
        coarse = super().forward(input)  # type: ignore[no-untyped-call]  # untyped in torch
        return torch.cat([input, interpolate(coarse, scale_factor=2)], dim=1)


def shapes(num_images: int) -> dict[str, Tensor]:
    """Draw a disc and a square of equal brightness on noise, (N, 1, 24, 24), and their masks, (N, 2, 24, 24)."""
    radius, centre = 3 + 3 * torch.rand(num_images, 2, 1, 1), 5 + 13 * torch.rand(2, num_images, 2, 1, 1)
    down, across = (torch.arange(24)[:, None] - centre[0]).abs(), (torch.arange(24) - centre[1]).abs()
    masks = torch.stack([torch.hypot(down, across)[:, 0], torch.maximum(down, across)[:, 1]], dim=1) < radius
    images = masks.any(dim=1, keepdim=True) + 0.3 * torch.randn(num_images, 1, 24, 24)
    return {"features": images, "targets": masks.float()}


def main(**where: Any) -> dict[str, float]:
    """Train; return IoU and Dice on unseen images, and the IoU of predicting both shapes wherever it is bright."""
    torch.manual_seed(0)
    train, valid = shapes(1000), shapes(200)
    model = nn.Sequential(
        Coarser(conv(1, 16, stride=2), Coarser(conv(16, 32, stride=2), conv(32, 32)), conv(16 + 32, 16)),
        nn.Conv2d(1 + 16, 2, 3, padding=1),
    )
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.BCEWithLogitsLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders={
            "train": dl.TensorLoader(train, batch_size=25, shuffle=True),
            "valid": dl.TensorLoader(valid, batch_size=25),
        },
        callbacks=[each(threshold=0) for each in (dl.IOUCallback, dl.DiceCallback)],
        num_epochs=8,
        loggers={"console": None},
        **where,
    )
    masks, bright = valid["targets"] > 0.5, valid["features"] > 0.5
    of_brightness = ((bright & masks).sum((0, 2, 3)) / (bright | masks).sum((0, 2, 3))).mean().item()
    return {**runner.epoch_metrics["valid"], "iou_of_brightness": of_brightness}


if __name__ == "__main__":
    learned = main()
    print("IoU {iou:.3f} (brightness alone {iou_of_brightness:.3f}), Dice {dice:.3f}".format(**learned))
