"""Layers that torch.nn lacks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Add to the input what `module` makes of it: ``x + module(x)``.

    Args:
        module: keeps the shape of its input and does not change it in place (its first layer is no in-place ReLU).

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
            ValueError: `module` changes the shape. Shapes that broadcast are refused too: they would add up in silence.
        """
        branch: Tensor = self.module(x)
        # While tracing, sizes are tensors: the comparison would warn, and be frozen into the trace.
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # public, but untyped in torch
        if not tracing and branch.shape != x.shape:
            raise ValueError(
                f"ResidualBlock adds its input to its module's output: expected {x.shape}, got {branch.shape}; give "
                "the module as many channels out as in, stride 1, and padding that keeps the size"
            )
        return x + branch
