"""ResNet-9: small enough for a laptop, accurate enough for 90 % on CIFAR-10."""

from torch import nn

from runnerkit.contrib import ResidualBlock


def conv_block(in_channels: int, out_channels: int, pool: bool = False) -> nn.Sequential:
    """Convolve, normalize and rectify (N, C, H, W); `pool` halves H and W."""
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    ]
    if pool:
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def resnet9(in_channels: int = 3, num_classes: int = 10, width: int = 64) -> nn.Sequential:
    """Build ResNet-9, which maps (N, in_channels, 32, 32) to (N, num_classes) logits.

    Args:
        in_channels: 3 for RGB.
        num_classes: number of logits.
        width: channels of the first layer; the last has 8 times as many (64: 6.6 million parameters; 8: 0.1 million).

    >>> import torch
    >>> resnet9(width=8)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return nn.Sequential(
        conv_block(in_channels, width),
        conv_block(width, 2 * width, pool=True),
        ResidualBlock(nn.Sequential(conv_block(2 * width, 2 * width), conv_block(2 * width, 2 * width))),
        conv_block(2 * width, 4 * width, pool=True),
        conv_block(4 * width, 8 * width, pool=True),
        ResidualBlock(nn.Sequential(conv_block(8 * width, 8 * width), conv_block(8 * width, 8 * width))),
        nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * width, num_classes)),
    )
