"""A small network for examples."""

from __future__ import annotations

from torch import Tensor, nn

from runnerkit.contrib.layers import Normalize

__all__ = ["MnistSimpleNet"]


class MnistSimpleNet(nn.Module):
    """Two convolutions and two linear layers, for images (N, 1, 28, 28).

    Args:
        out_features: D, the number of outputs.
        normalize: divide each output vector by its norm.

    >>> import torch
    >>> MnistSimpleNet(out_features=16)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 16])
    """

    def __init__(self, out_features: int, normalize: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 12 * 12, 128),
            nn.ReLU(),
            nn.Linear(128, out_features),
            Normalize() if normalize else nn.Identity(),
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.net(x)
        return features
