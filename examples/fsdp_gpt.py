"""Train a GPT that no process ever holds whole: each process makes, trains and saves its own shards of the weights.

python examples/fsdp_gpt.py
torchrun --standalone --nproc-per-node=4 examples/fsdp_gpt.py --tensor-parallel 2
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader

from runnerkit import dl, utils

LENGTH, VOCABULARY = 128, 256  # bytes of a text; a byte is a token


class Block(nn.Module):
    """Attention to earlier tokens, then a feed-forward network: a unit that is gathered, used and freed."""

    def __init__(self, width: int, head_width: int = 16) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to the same shape."""
        normed = self.norm(x)
        query, key, value = (
            each(normed).unflatten(2, (-1, self.head_width)).transpose(1, 2)  # as many heads as this process has
            for each in (self.query, self.key, self.value)
        )
        x = x + self.out(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.down(gelu(self.up(self.feed_norm(x))))
        return mixed


# Of each block, the first layers are divided by columns and the second ones by rows, so that a process has whole heads
# and whole hidden units, and only sums of the second layers' outputs are exchanged.
PLAN = {
    **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
}


class GPT(nn.Module):
    """A causal transformer that maps tokens (N, T) to logits of the next ones (N, T, VOCABULARY)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def _init_weights(self, module: nn.Module) -> None:
        """Fill a module's weights: the engine calls this for those modules whose shards the process makes."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next tokens."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))
        return logits


def texts(*, train: bool) -> Any:
    """Return Python's `help()` topics, an int64 tensor (N, LENGTH + 1), as a data set; every tenth text validates."""
    everything = torch.tensor(list("\n\n".join(topics.values()).encode()))
    rows = everything.unfold(0, LENGTH + 1, LENGTH)
    return rows[(torch.arange(len(rows)) % 10 != 0) == train]


class LanguageModel(dl.Runner):
    """Predicts the next byte."""

    def handle_batch(self, batch: Tensor) -> None:
        """Compute the loss."""
        logits = self.model(batch[:, :-1])
        self.batch_metrics["loss"] = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(options: argparse.Namespace) -> LanguageModel:
    """Train, or resume a training that was stopped, on the same or another mesh of processes."""
    with utils.parameters_on_meta():
        model = GPT(options.width, options.depth)  # its parameters have a shape, but no values
    load = partial(DataLoader, batch_size=options.batch_size)
    return LanguageModel().train(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
        scheduler=partial(dl.cosine_with_warmup, warmup_steps=options.steps // 10),
        loaders={"train": load(texts(train=True), shuffle=True), "valid": load(texts(train=False))},
        callbacks=[
            dl.BackwardCallback("loss"),
            dl.OptimizerCallback("loss"),
            dl.SchedulerCallback(interval="step"),
            dl.CheckpointCallback(
                options.logdir, monitor="valid/loss", mode="min", content="runner", every_steps=50, asynchronous=True
            ),
        ],
        engine=dl.FullyShardedDataParallelEngine(
            options.processes,
            init="meta",
            shard_modules=[Block],
            checkpoint_modules=[Block],
            tensor_parallel=options.tensor_parallel,
            plan=PLAN if options.tensor_parallel > 1 else None,
        ),
        gradient_clip=1.0,
        num_steps=options.steps,
        valid_every_steps=max(1, options.steps // 4),
        logdir=options.logdir,
        resume="auto",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; then one process merges the shards into a file that plain torch loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, help="(default: one per GPU, or 4; a launcher's number overrides it)")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="processes that divide a layer's weights")
    parser.add_argument("--batch-size", type=int, default=16, help="texts of each --tensor-parallel processes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--logdir", default="logs/fsdp_gpt")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    if options.processes is None and not torch.cuda.is_available():
        options.processes = 4
    runner = train(options)
    if runner.engine.is_main_process:
        path = utils.export_full_state(options.logdir, f"{options.logdir}/whole.pth")
        print(f"{runner.epoch_metrics['valid']['loss']:.2f} nats per unseen byte; the whole model is in {path}")


if __name__ == "__main__":
    main()
