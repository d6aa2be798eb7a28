"""Layers that torch.nn does not provide."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ResidualBlock"]


class ResidualBlock(nn.Module):
    """A residual connection: ``x + module(x)``.

    Args:
        module: returns the shape of its input and does not change the input in place, as a first in-place ReLU would.

    >>> block = ResidualBlock(nn.Sequential(nn.Conv2d(8, 8, kernel_size=3, padding=1), nn.ReLU()))
    >>> block(torch.ones(2, 8, 16, 16)).shape
    torch.Size([2, 8, 16, 16])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``x + module(x)``.

        Raises:
            ValueError: `module` changes the shape, even to one that would broadcast silently.
        """
        branch: Tensor = self.module(x)
        # While tracing, sizes are tensors: the comparison would warn and become part of the trace.
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # public, but untyped in torch
        if not tracing and branch.shape != x.shape:
            raise ValueError(
                f"ResidualBlock adds its input to its module's output: expected {x.shape}, got {branch.shape}; use "
                "a module with equal input and output channels, stride 1, and padding that keeps the size"
            )
        return x + branch
