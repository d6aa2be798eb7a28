"""Data, model and schedule of the language model, for runnerkit (train_gpt.py) and a hand-written loop (by_hand.py)."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

SHORTEST, LONGEST = 16, 192  # bytes of a paragraph
NO_TOKEN, VOCABULARY = 0, 256  # a byte is a token; no text has byte 0


class Options(NamedTuple):
    """Sizes of a training."""

    num_steps: int = 300
    batch_size: int = 32  # paragraphs in a batch, of all processes together
    accumulation_steps: int = 2
    width: int = 64
    depth: int = 2
    max_lr: float = 6e-3
    warmup_steps: int = 20
    max_norm: float = 1.0


def paragraphs(*, train: bool) -> Any:
    """Return paragraphs of Python's `help()` topics: a list of int64 (SHORTEST to LONGEST,); every tenth validates."""
    texts = [each for text in topics.values() for each in text.split("\n\n")]
    encoded = [torch.tensor(list(each.strip().encode()[:LONGEST])) for each in texts]
    long_enough = [each for each in encoded if len(each) >= SHORTEST]
    return [each for number, each in enumerate(long_enough) if (number % 10 != 0) == train]


def padded(texts: list[Tensor]) -> Tensor:
    """Collate paragraphs to (N, length of the longest), filled with NO_TOKEN."""
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=NO_TOKEN)


class GPT(nn.Module):
    """A causal transformer that maps tokens (N, T) to logits of the next ones (N, T, VOCABULARY)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.what, self.where = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.what(tokens) + self.where.weight[: tokens.shape[1]])))
        return logits


class Block(nn.Module):
    """Attention to earlier tokens, then a perceptron."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, dim=2)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        mixed_twice: Tensor = x + self.perceptron(self.second(x))
        return mixed_twice


def make_model(options: Options) -> GPT:
    """Create the model with weights of a fixed seed."""
    torch.manual_seed(0)
    return GPT(options.width, options.depth)


def loss_of(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss over the tokens that are predicted, in nats, and their number."""
    targets = tokens[:, 1:]
    logits = model(tokens[:, :-1])
    losses = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=NO_TOKEN)
    num_tokens = (targets != NO_TOKEN).sum()
    return losses.sum() / num_tokens.clamp(min=1), num_tokens
