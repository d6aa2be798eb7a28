"""ResNet (He et al. 2015, arXiv:1512.03385) and ResNeXt (Xie et al. 2016, arXiv:1611.05431) for 32 x 32 images.

The blocks are torchvision's. Its own ResNet always starts with 64 channels and a fourfold reduction.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from runnerkit.torchvision_cpu import import_torchvision


def scaled(channels: int, width: float) -> int:
    """Multiply a number of channels by `width`; the result is at least 1."""
    return max(1, round(channels * width))


def cifar_stem(channels: int) -> nn.Sequential:
    """Turn (N, 3, 32, 32) into (N, channels, 32, 32): 3 x 3, whereas ImageNet's stem is 7 x 7 with two strides of 2."""
    return nn.Sequential(
        nn.Conv2d(3, channels, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
    )


def head(channels: int, num_classes: int) -> nn.Sequential:
    """Average (N, channels, H, W) over each image, and map it to (N, num_classes) logits."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def residual_block(in_channels: int, out_channels: int, stride: int = 1, **options: Any) -> nn.Module:
    """Build a block; its shortcut is a 1 x 1 convolution if size or channels change.

    Args:
        in_channels, out_channels: channels of the block, not of its bottleneck.
        stride: 2 halves height and width.
        options: `groups` and `base_width` of torchvision's Bottleneck; if empty, the block has two 3 x 3 convolutions.
    """
    blocks = import_torchvision().models.resnet
    shortcut = None
    if stride != 1 or in_channels != out_channels:
        shortcut = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
        )
    kind = blocks.Bottleneck if options else blocks.BasicBlock
    block: nn.Module = kind(in_channels, out_channels // kind.expansion, stride, shortcut, **options)
    return block


def residual_network(
    depths: Sequence[int], channels: Sequence[int], *, stem_channels: int, num_classes: int, **options: Any
) -> nn.Sequential:
    """Stack stages of blocks; each stage except the first halves height and width.

    Args:
        depths: number of blocks of each stage.
        channels: output channels of each stage.
        stem_channels: input channels of the first stage.
        num_classes: number of logits.
        options: passed to :func:`residual_block`.
    """
    stages = []
    in_channels = stem_channels
    for number, (depth, out_channels) in enumerate(zip(depths, channels, strict=True)):
        blocks = [residual_block(in_channels, out_channels, stride=1 if number == 0 else 2, **options)]
        blocks += [residual_block(out_channels, out_channels, **options) for _ in range(depth - 1)]
        stages.append(nn.Sequential(*blocks))
        in_channels = out_channels
    return nn.Sequential(cifar_stem(stem_channels), *stages, head(in_channels, num_classes))


def resnet18(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build ResNet-18; `width` multiplies the channels."""
    channels = [scaled(each, width) for each in (64, 128, 256, 512)]
    return residual_network((2, 2, 2, 2), channels, stem_channels=channels[0], num_classes=num_classes)


def resnet50(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build ResNet-50."""
    return _bottlenecks((3, 4, 6, 3), num_classes, width, groups=1, base_width=64)


def resnet101(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build ResNet-101."""
    return _bottlenecks((3, 4, 23, 3), num_classes, width, groups=1, base_width=64)


def resnext29_32x4d(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build ResNeXt-29 with 32 groups of 4 channels in the first stage; a `width` of 1/4 leaves 1 channel."""
    return _bottlenecks((3, 3, 3), num_classes, width, groups=32, base_width=4)


def resnext29_2x64d(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build ResNeXt-29 with 2 groups of 64 channels in the first stage."""
    return _bottlenecks((3, 3, 3), num_classes, width, groups=2, base_width=64)


def _bottlenecks(
    depths: Sequence[int], num_classes: int, width: float, *, groups: int, base_width: int
) -> nn.Sequential:
    planes = [scaled(64, width) * 2**stage for stage in range(len(depths))]
    if planes[0] * base_width < 64:
        raise ValueError(f"width={width} leaves no channel in a group; it must be >= {1 / base_width}")
    return residual_network(
        depths, [4 * each for each in planes], stem_channels=planes[0], num_classes=num_classes,
        groups=groups, base_width=base_width,
    )  # fmt: skip
