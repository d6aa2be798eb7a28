"""Layers that torch.nn does not provide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Flatten",
    "GaussianNoise",
    "GeM2d",
    "GlobalAvgPool2d",
    "GlobalConcatPool2d",
    "GlobalMaxPool2d",
    "Lambda",
    "Normalize",
    "ResidualBlock",
]


class Flatten(nn.Module):
    """Samples as vectors: (N, ...) to (N, D).

    >>> Flatten()(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 12])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Lambda(nn.Module):
    """A function as a layer.

    Args:
        lambda_fn: called with the inputs.

    >>> Lambda(torch.abs)(torch.tensor([-1.0]))
    tensor([1.])
    """

    def __init__(self, lambda_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.lambda_fn = lambda_fn

    def forward(self, *inputs: Any) -> Any:
        return self.lambda_fn(*inputs)


class Normalize(nn.Module):
    """``torch.nn.functional.normalize`` as a layer: by default, rows (N, D) are divided by their norms.

    Args:
        p: exponent of the norm.
        dim: dimension whose vectors are divided.
        eps: smaller norms are replaced by it.

    >>> Normalize()(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def __init__(self, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> None:
        super().__init__()
        self.p, self.dim, self.eps = p, dim, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, self.p, self.dim, self.eps)


class GaussianNoise(nn.Module):
    """Adds noise in training mode.

    Args:
        stddev: of the normal distribution.

    >>> GaussianNoise(stddev=0.5).eval()(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, stddev: float = 0.1) -> None:
        super().__init__()
        self.stddev = stddev

    def forward(self, x: Tensor) -> Tensor:
        return x + self.stddev * torch.randn_like(x) if self.training else x


class GlobalAvgPool2d(nn.Module):
    """Mean of each channel: (N, C, H, W) to (N, C, 1, 1).

    >>> GlobalAvgPool2d()(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[[[2.]]]])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(-2, -1), keepdim=True)


class GlobalMaxPool2d(nn.Module):
    """Maximum of each channel: (N, C, H, W) to (N, C, 1, 1).

    >>> GlobalMaxPool2d()(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[[[3.]]]])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(dim=(-2, -1), keepdim=True)


class GlobalConcatPool2d(nn.Module):
    """Mean and maximum of each channel: (N, C, H, W) to (N, 2 * C, 1, 1), means first.

    >>> GlobalConcatPool2d()(torch.tensor([[[[1.0, 3.0]]]])).flatten()
    tensor([2., 3.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean(dim=(-2, -1), keepdim=True), x.amax(dim=(-2, -1), keepdim=True)], dim=1)


class GeM2d(nn.Module):
    """Generalized mean of each channel, mean(x^p)^(1/p): (N, C, H, W) to (N, C, 1, 1). arXiv:1711.02512

    Args:
        p: 1 is the mean; infinity is the maximum.
        p_trainable: whether p is a parameter.
        eps: smaller inputs are set to it.

    >>> GeM2d(p=2.0)(torch.tensor([[[[1.0, 7.0]]]]))
    tensor([[[[5.]]]])
    """

    def __init__(self, p: float = 3.0, p_trainable: bool = False, eps: float = 1e-7) -> None:
        super().__init__()
        self.p: float | nn.Parameter = nn.Parameter(torch.tensor([float(p)])) if p_trainable else p
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.clamp(min=self.eps)
        if not isinstance(self.p, Tensor) and self.p == float("inf"):
            return x.amax(dim=(-2, -1), keepdim=True)
        return x.pow(self.p).mean(dim=(-2, -1), keepdim=True).pow(1 / self.p)


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
