"""Models for 32 x 32 images: each maps (N, 3, 32, 32) floats to (N, num_classes) logits."""

from collections.abc import Callable

from torch import nn

from zoo.adapted import densenet121, mobilenet_v2, regnet_x_200mf, regnet_y_400mf, vgg16
from zoo.dla import dla, simple_dla
from zoo.dpn import dpn92
from zoo.preact import preact_resnet18
from zoo.resnet import resnet18, resnet50, resnet101, resnext29_2x64d, resnext29_32x4d

# Each takes num_classes=10 and width=1.0, a factor for the channels.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "VGG16": vgg16,
    "ResNet18": resnet18,
    "ResNet50": resnet50,
    "ResNet101": resnet101,
    "RegNetX_200MF": regnet_x_200mf,
    "RegNetY_400MF": regnet_y_400mf,
    "MobileNetV2": mobilenet_v2,
    "ResNeXt29_32x4d": resnext29_32x4d,
    "ResNeXt29_2x64d": resnext29_2x64d,
    "SimpleDLA": simple_dla,
    "DLA": dla,
    "DenseNet121": densenet121,
    "PreActResNet18": preact_resnet18,
    "DPN92": dpn92,
}
