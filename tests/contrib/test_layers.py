"""Layers: the residual block, and the ResNet-9 example built from it."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from runnerkit.contrib import ResidualBlock

EXAMPLE = Path(__file__).parents[2] / "examples" / "resnet9_cifar10" / "model.py"


def test_residual_block_adds_its_input():
    """The output is x + module(x), and the gradient is 1 + the module's gradient."""
    block = ResidualBlock(nn.Linear(3, 3, bias=False))
    nn.init.constant_(block.module.weight, 0.5)
    x = torch.randn(2, 3, requires_grad=True)

    output = block(x)
    output.sum().backward()

    torch.testing.assert_close(output, x + x.sum(dim=1, keepdim=True) * 0.5)
    assert torch.equal(x.grad, torch.full((2, 3), 1 + 3 * 0.5))


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Conv2d(3, 5, kernel_size=1), [2, 5, 8, 8]), (nn.Conv2d(3, 1, kernel_size=1), [2, 1, 8, 8])],
    ids=["incompatible", "broadcastable"],
)
def test_module_that_changes_the_shape_is_refused_with_both_shapes(module, shape):
    """This includes shapes that broadcast, whose sum would be silently wrong."""
    block = ResidualBlock(module)

    with pytest.raises(ValueError, match=r"expected .* got") as caught:
        block(torch.zeros(2, 3, 8, 8))

    assert str([2, 3, 8, 8]) in str(caught.value)
    assert str(shape) in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning", "ignore:.*torch.jit.trace.*:FutureWarning")
def test_residual_block_traces_without_a_warning():
    """The shape check neither causes a TracerWarning, which is an error here, nor fixes the batch size."""
    block = ResidualBlock(nn.Conv2d(3, 3, kernel_size=1))
    x = torch.randn(5, 3, 4, 4)

    traced = torch.jit.trace(block, torch.zeros(2, 3, 4, 4))

    torch.testing.assert_close(traced(x), block(x))


def test_resnet9_example_has_its_published_size_and_reaches_every_weight():
    """It has 6,575,370 parameters, the sum over its layers; in a narrow one, every weight gets a gradient."""
    resnet9 = runpy.run_path(str(EXAMPLE))["resnet9"]
    channels = [(3, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
    expected = sum(9 * i * o + o + 2 * o for i, o in channels) + 512 * 10 + 10

    with torch.device("meta"):
        full = resnet9()
    narrow = resnet9(in_channels=1, num_classes=4, width=2)
    logits = narrow(torch.randn(3, 1, 32, 32))
    logits.square().sum().backward()

    assert sum(weight.numel() for weight in full.parameters()) == expected
    assert logits.shape == (3, 4)
    assert all(weight.grad is not None for weight in narrow.parameters())
