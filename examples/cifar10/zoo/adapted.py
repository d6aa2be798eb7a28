"""torchvision's networks with strides for 32 x 32 images and adjustable width."""

from typing import Any

from torch import nn

from runnerkit.torchvision_cpu import import_torchvision

from zoo.resnet import scaled


def vgg16(num_classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Build VGG-16 with batch norm (arXiv:1409.1556); one linear layer replaces three, since its input is 1 x 1."""
    vgg = import_torchvision().models.vgg
    # "M" is a pooling layer; a number is a 3 x 3 convolution with that many output channels.
    layers = [each if each == "M" else scaled(each, width) for each in vgg.cfgs["D"]]
    return nn.Sequential(
        vgg.make_layers(layers, batch_norm=True), nn.Flatten(), nn.Linear(scaled(512, width), num_classes)
    )


def mobilenet_v2(num_classes: int = 10, width: float = 1.0) -> nn.Module:
    """Build MobileNetV2 (arXiv:1801.04381); the first two of its five strides of 2 become 1, which leaves 4 x 4."""
    # Expansion, channels, depth and stride of each stage.
    rows = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]
    model: nn.Module = import_torchvision().models.MobileNetV2(
        num_classes=num_classes, width_mult=width, inverted_residual_setting=rows
    )
    features: Any = model.features
    features[0][0].stride = (1, 1)
    return model


def densenet121(num_classes: int = 10, width: float = 1.0) -> nn.Module:
    """Build DenseNet-121 (arXiv:1608.06993) with a 3 x 3 stem without pooling."""
    model: nn.Module = import_torchvision().models.DenseNet(
        growth_rate=scaled(32, width), num_init_features=scaled(64, width), num_classes=num_classes
    )
    features: Any = model.features
    features.conv0 = nn.Conv2d(3, scaled(64, width), kernel_size=3, padding=1, bias=False)
    features.pool0 = nn.Identity()
    return model


def regnet_x_200mf(num_classes: int = 10, width: float = 1.0) -> nn.Module:
    """Build RegNetX-200MF (arXiv:2003.13678) with 13 blocks."""
    return _regnet(num_classes, width, depth=13, w_0=24, w_a=36.44, w_m=2.49, group_width=8)


def regnet_y_400mf(num_classes: int = 10, width: float = 1.0) -> nn.Module:
    """Build RegNetY-400MF with 16 blocks and squeeze-and-excitation."""
    return _regnet(num_classes, width, depth=16, w_0=48, w_a=27.89, w_m=2.09, group_width=8, se_ratio=0.25)


def _regnet(num_classes: int, width: float, *, w_0: int, w_a: float, **parameters: Any) -> nn.Module:
    """Build a RegNet with its paper's parameters; the first three of its five strides become 1, which leaves 8 x 8."""
    regnet = import_torchvision().models.regnet
    stages = regnet.BlockParams.from_init_params(w_0=8 * scaled(w_0 // 8, width), w_a=w_a * width, **parameters)
    stages.strides[:2] = [1, 1]
    model: nn.Module = regnet.RegNet(stages, num_classes=num_classes, stem_width=scaled(32, width))
    stem: Any = model.stem
    stem[0].stride = (1, 1)
    return model
