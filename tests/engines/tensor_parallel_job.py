"""A small transformer trained on meshes of four processes; its blocks divide weights, its norms do not."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl, utils
from tests import tiny

WIDTH, HEADS, LENGTH, NUM_TOKENS, SEED = 12, 4, 6, 11, 42
PLAN = {
    "blocks.*.qkv.*": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather",
}


class Block(nn.Module):
    """Attention and a feed-forward network, each with a skip connection."""

    def __init__(self, dropout, inner_dropout):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "qkv"})
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.up, self.down, self.inner_dropout = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Dropout(inner_dropout)

    def forward(self, x):
        """Map (N, length, width) to the same shape."""
        normed, shape = self.norms[0](x), (-1, WIDTH // HEADS)  # as many heads as this process has
        q, k, v = (each(normed).unflatten(-1, shape).transpose(1, 2) for each in self.qkv.values())
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(self.inner_dropout(nn.functional.gelu(self.up(self.norms[1](x))))))


class Transformer(nn.Module):
    """A language model with learned positions."""

    def __init__(self, dropout=0.0, inner_dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout, inner_dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_TOKENS, bias=False)

    def reset_parameters(self):
        """Fill the positions."""
        nn.init.normal_(self.positions, std=0.1)

    def forward(self, tokens):
        """Map (N, length) tokens to (N, length, tokens) logits."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Runner(dl.Runner):
    """A runner whose loss is a mean over tokens that are not padding, 0; a batch weighs as many as it has."""

    weights_tokens = True

    def handle_batch(self, batch):
        """Predict each token from those before it."""
        tokens, targets = batch
        logits = self.model(tokens)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="none")
        if self.weights_tokens:
            self.batch_weight = (targets != 0).sum()
        self.batch_metrics["loss"] = losses.sum() / self.batch_weight if self.weights_tokens else losses.mean()


def data(num_samples=26):
    """Return sequences that count up, with padding of different lengths."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(1, NUM_TOKENS, (num_samples, 1), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (num_samples, 1), generator=generator)
    tokens = (starts + torch.arange(LENGTH + 1)) % (NUM_TOKENS - 1) + 1
    targets = torch.where(torch.arange(LENGTH) < lengths, tokens[:, 1:], 0)
    return TensorDataset(tokens[:, :-1], targets)


def mesh(num_processes, tensor_parallel, **kwargs):
    """Return an engine."""
    plan = PLAN if tensor_parallel > 1 else None
    arguments = {"device": "cpu", "timeout_s": 60, "shard_modules": [Block], "plan": plan, **kwargs}
    return dl.FullyShardedDataParallelEngine(num_processes, tensor_parallel=tensor_parallel, **arguments)


def train(engine, *, batch_size=8, dropout=0.0, inner_dropout=0.0, accumulate=1, clip=None, runner=Runner, model=None,
          callbacks=None, **options):  # fmt: skip
    """Train; return the runner."""
    model = model or utils.initialize_parameters(Transformer(dropout, inner_dropout), seed=SEED)
    step = dl.OptimizerCallback(accumulation_steps=accumulate, gradient_clip=clip)
    training, valid = DataLoader(data(), batch_size, shuffle=True), DataLoader(data(13), batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)  # Adam's steps amplify rounding
    callbacks = {"backward": dl.BackwardCallback(), "step": step, **(callbacks or {})}
    arguments = {"optimizer": optimizer, "loaders": {"train": training, "valid": valid}, "callbacks": callbacks}
    return tiny.train(model, runner=runner(), engine=engine, **arguments, **{"num_epochs": 2, **options})
