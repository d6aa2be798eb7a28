"""Deep layer aggregation: trees of residual blocks, joined by 1 x 1 convolutions (Yu et al. 2017, arXiv:1707.06484)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zoo.resnet import cifar_stem, head, residual_block, scaled


class Tree(nn.Module):
    """A module that runs its parts in sequence and aggregates all their outputs.

    Args:
        parts: each maps the previous part's output to `channels` channels; all outputs have the same height and width.
        channels: output channels of each part and of the tree.
        bypass: maps the tree's input to the same shape, to be aggregated too.
    """

    def __init__(self, parts: Sequence[nn.Module], channels: int, *, bypass: nn.Module | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.bypass = bypass
        num_joined = len(parts) + (bypass is not None)
        self.root = nn.Sequential(
            nn.Conv2d(num_joined * channels, channels, kernel_size=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map the first part's input to (N, channels, H, W)."""
        results = [] if self.bypass is None else [self.bypass(x)]
        for part in self.parts:
            x = part(x)
            results.append(x)
        joined: Tensor = self.root(torch.cat(results, dim=1))
        return joined


def binary_tree(in_channels: int, out_channels: int, depth: int, stride: int) -> Tree:
    """Build SimpleDLA's tree: two trees of one level less, down to two blocks."""
    if depth == 1:
        left, right = residual_block(in_channels, out_channels, stride), residual_block(out_channels, out_channels)
    else:
        left = binary_tree(in_channels, out_channels, depth - 1, stride)
        right = binary_tree(out_channels, out_channels, depth - 1, 1)
    return Tree([left, right], out_channels)


def hierarchical_tree(in_channels: int, out_channels: int, depth: int, stride: int) -> Tree:
    """Aggregate a tree of each lower level and two blocks in one root, as in the paper's figure 2 (f).

    If there are lower levels, the root also receives the tree's input through a separate block.
    """
    shape = (in_channels, out_channels, stride)  # of the block that reads the tree's input
    if depth == 1:
        return Tree([residual_block(*shape), residual_block(out_channels, out_channels)], out_channels)
    parts: list[nn.Module] = [hierarchical_tree(in_channels, out_channels, depth - 1, stride)]
    parts += [hierarchical_tree(out_channels, out_channels, level, 1) for level in range(depth - 2, 0, -1)]
    parts += [residual_block(out_channels, out_channels) for _ in range(2)]
    return Tree(parts, out_channels, bypass=residual_block(*shape))


def simple_dla(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build the simplified DLA with binary trees; `width` multiplies the channels."""
    return _aggregated(binary_tree, num_classes, width)


def dla(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build DLA with the channels and levels of DLA-34."""
    return _aggregated(hierarchical_tree, num_classes, width)


def _aggregated(tree: Callable[[int, int, int, int], Tree], num_classes: int, width: float) -> nn.Sequential:
    base, second, *channels = [scaled(each, width) for each in (16, 32, 64, 128, 256, 512)]
    layers: list[nn.Module] = [cifar_stem(base)]
    for in_channels, out_channels in ((base, base), (base, second)):
        convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]
    in_channels = second
    for out_channels, depth, stride in zip(channels, (1, 2, 2, 1), (1, 2, 2, 2), strict=True):
        layers.append(tree(in_channels, out_channels, depth, stride))
        in_channels = out_channels
    return nn.Sequential(*layers, head(in_channels, num_classes))
