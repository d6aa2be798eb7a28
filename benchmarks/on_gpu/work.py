"""Models, batches and loops that are timed: a tiny network, a ResNet and a stack of transformer blocks."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.on_gpu.check import Setting, Skipped

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A transformer block with causal attention; input and output are (N, T, width)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.attention(self.norms[0](hidden)).unflatten(2, (3, self.num_heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.projection(attended)
        return hidden + self.mlp(self.norms[1](hidden))


class Transformer(nn.Module):
    """Embeddings, blocks and a head; tokens (N, T) int64 give logits (N, vocabulary, T).

    Args:
        recomputes: whether backward recomputes the activations of each block.
    """

    def __init__(self, setting: Setting, *, recomputes: bool = False) -> None:
        super().__init__()
        self.num_tokens, self.length = setting.size(gpu=16384, cpu=64), setting.size(gpu=512, cpu=16)
        width, num_heads = setting.size(gpu=768, cpu=32), setting.size(gpu=12, cpu=2)
        self.tokens, self.places = nn.Embedding(self.num_tokens, width), nn.Embedding(self.length, width)
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(setting.size(gpu=8, cpu=2))])
        self.head = nn.Linear(width, self.num_tokens)
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recomputes else block(hidden)
        return self.head(hidden).transpose(1, 2)


@dataclass(frozen=True)
class Work:
    """A model and its batch, trained with SGD and cross-entropy.

    Attributes:
        make_model: creates the model from a fixed seed.
        make_batch: creates inputs and targets on the device.
        dtype: autocast's dtype; None is fp32.
        num_steps: steps in a turn.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    num_steps: int
    dtype: torch.dtype | None = None
    channels_last: bool = False


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def tiny(setting: Setting) -> Work:
    """Return an MLP 64-64-10 on batches of 32, whose kernels take less time than their launch."""
    layers = partial(_seeded, lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    batch = partial(_batch, setting, lambda size: torch.randn(size, 64), 32, 10)
    return Work(layers, batch, num_steps=setting.size(gpu=200, cpu=20))


def resnet(setting: Setting) -> Work:
    """Return torchvision's ResNet-50 in bf16 and channels_last on batches of 128 images of 224 x 224."""
    size, num_images = setting.size(gpu=224, cpu=32), setting.size(gpu=128, cpu=2)
    return Work(
        partial(_seeded, resnet_model(setting)),
        partial(_batch, setting, lambda number: torch.randn(number, 3, size, size), num_images, 1000),
        num_steps=setting.size(gpu=10, cpu=1),
        dtype=torch.bfloat16,
        channels_last=True,
    )


def resnet_model(setting: Setting) -> Callable[[], nn.Module]:
    """Return torchvision's constructor of ResNet-50, or of ResNet-18 for a dry run."""
    make: Callable[[], nn.Module] = torchvision_models().resnet50 if setting.is_gpu else torchvision_models().resnet18
    return make


def torchvision_models() -> Any:
    """Import ``torchvision.models``.

    Raises:
        Skipped: torchvision is missing or does not match torch.
    """
    from runnerkit.torchvision_cpu import import_torchvision

    try:
        import_torchvision()
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:
        raise Skipped(f"needs torchvision: {error}") from None


def transformer(setting: Setting, **options: Any) -> Work:
    """Return a stack of transformer blocks in bf16 on 16 sequences of 512 tokens."""
    model = partial(_seeded, partial(Transformer, setting, **options))
    return Work(
        model,
        lambda: _on_device(setting, *tokens(setting)),
        num_steps=setting.size(gpu=10, cpu=2),
        dtype=torch.bfloat16,
    )


def tokens(setting: Setting) -> Batch:
    """Draw sequences and, as targets, the same sequences shifted by one, in host memory."""
    size, length, vocabulary = (
        setting.size(gpu=16, cpu=2), setting.size(gpu=512, cpu=16), setting.size(gpu=16384, cpu=64)
    )  # fmt: skip
    drawn = torch.randint(vocabulary, (size, length + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def _batch(setting: Setting, make_inputs: Callable[[int], Tensor], size: int, num_classes: int) -> Batch:
    torch.manual_seed(0)
    inputs, targets = make_inputs(size), torch.randint(num_classes, (size,))
    return _on_device(setting, inputs, targets)


def _on_device(setting: Setting, inputs: Tensor, targets: Tensor) -> Batch:
    return inputs.to(setting.device), targets.to(setting.device)
