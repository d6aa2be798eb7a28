"""Dual path network: channels are added, as in ResNet, and concatenated, as in DenseNet (arXiv:1707.01629).

Norm and ReLU follow each convolution, as in ResNet; in the authors' code they precede it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.resnet import cifar_stem, head, scaled

NUM_GROUPS = 32


class DualPathBlock(nn.Module):
    """A bottleneck whose first `added` channels are added to the input, and whose last `joined` are concatenated.

    Args:
        in_channels: input channels, first the residual path's, then the dense path's.
        bottleneck: channels of the grouped 3 x 3 convolution, a multiple of 32.
        added: channels of the residual path.
        joined: channels by which the dense path grows.
        stride: 2 halves height and width.
        is_first: first of its stage: a 1 x 1 convolution maps the input to ``added + joined`` channels.
    """

    def __init__(
        self, in_channels: int, bottleneck: int, added: int, joined: int, *, stride: int = 1, is_first: bool = False
    ) -> None:
        super().__init__()
        self.added = added
        self.bottleneck = nn.Sequential(
            nn.Conv2d(in_channels, bottleneck, kernel_size=1, bias=False),
            nn.BatchNorm2d(bottleneck),
            nn.ReLU(inplace=True),
            nn.Conv2d(bottleneck, bottleneck, kernel_size=3, stride=stride, padding=1, groups=NUM_GROUPS, bias=False),
            nn.BatchNorm2d(bottleneck),
            nn.ReLU(inplace=True),
            nn.Conv2d(bottleneck, added + joined, kernel_size=1, bias=False),
            nn.BatchNorm2d(added + joined),
        )
        self.projection: nn.Module = nn.Identity()
        if is_first:
            self.projection = nn.Sequential(
                nn.Conv2d(in_channels, added + joined, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(added + joined),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, C + joined, H / stride, W / stride), for a projection of C channels."""
        old_sum, old_dense = self.projection(x).tensor_split([self.added], dim=1)
        new_sum, new_dense = self.bottleneck(x).tensor_split([self.added], dim=1)
        return F.relu(torch.cat([old_sum + new_sum, old_dense, new_dense], dim=1))


def dpn92(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build DPN-92; `width` multiplies the channels, rounded to a multiple of 32 in the bottleneck."""
    in_channels = scaled(64, width)
    layers: list[nn.Module] = [cifar_stem(in_channels)]
    for stage, (depth, growth) in enumerate(zip((3, 4, 20, 3), (16, 32, 24, 128), strict=True)):
        bottleneck = NUM_GROUPS * scaled(3 * 2**stage, width)
        added, joined = scaled(256 * 2**stage, width), scaled(growth, width)
        for place in range(depth):
            is_first = place == 0
            stride = 2 if is_first and stage > 0 else 1
            layers.append(DualPathBlock(in_channels, bottleneck, added, joined, stride=stride, is_first=is_first))
            in_channels = added + (place + 2) * joined  # one from the projection, and one from each block
    return nn.Sequential(*layers, head(in_channels, num_classes))
