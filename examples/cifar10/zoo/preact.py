"""ResNet with pre-activation: norm and ReLU precede each convolution (He et al. 2016, arXiv:1603.05027)."""

from torch import Tensor, nn

from zoo.resnet import head, scaled


class PreActBlock(nn.Module):
    """Two 3 x 3 convolutions added to a shortcut, without a ReLU after the sum.

    Args:
        in_channels, out_channels: channels of the input and output.
        stride: 2 halves height and width.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        # Not in place: an identity shortcut reads the block's input afterwards.
        self.activation = nn.Sequential(nn.BatchNorm2d(in_channels), nn.ReLU())
        self.convolutions = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        )
        self.projection = None
        if stride != 1 or in_channels != out_channels:
            self.projection = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride).

        A projection uses the activated input, as in the authors' code; an identity shortcut uses the input itself.
        """
        activated = self.activation(x)
        shortcut = x if self.projection is None else self.projection(activated)
        residual: Tensor = self.convolutions(activated)
        return residual + shortcut


def preact_resnet18(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build the pre-activation ResNet-18; `width` multiplies the channels."""
    in_channels = scaled(64, width)
    blocks: list[nn.Module] = [nn.Conv2d(3, in_channels, kernel_size=3, padding=1, bias=False)]
    for stage in range(4):
        out_channels = scaled(64 * 2**stage, width)
        blocks.append(PreActBlock(in_channels, out_channels, stride=1 if stage == 0 else 2))
        blocks.append(PreActBlock(out_channels, out_channels))
        in_channels = out_channels
    return nn.Sequential(*blocks, nn.BatchNorm2d(in_channels), nn.ReLU(inplace=True), head(in_channels, num_classes))
