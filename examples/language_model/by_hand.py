"""The training of train_gpt.py in a hand-written loop, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from math import cos, pi

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from small_gpt import Options, loss_of, make_model, padded, paragraphs


def train(options: Options, *, dtype: torch.dtype | None = None) -> list[float]:
    """Return the loss of each step, a mean over its tokens.

    Args:
        dtype: of autocast; None trains in float32.
    """
    model = make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.max_lr, weight_decay=0.1)
    losses = []
    for number, batches in enumerate(islice(steps(options), options.num_steps)):
        optimizer.param_groups[0]["lr"] = options.max_lr * share_of_lr(number, options)
        optimizer.zero_grad()
        num_tokens = sum(int((batch[:, 1:] != 0).sum()) for batch in batches)  # known before the first backward pass
        total = 0.0
        for batch in batches:
            with torch.autocast("cpu", dtype) if dtype is not None else nullcontext():
                loss, own = loss_of(model, batch)
            (loss * own / num_tokens).backward()
            total += float(loss.detach() * own)
        clip_grad_norm_(model.parameters(), options.max_norm)
        optimizer.step()
        losses.append(total / num_tokens)
    return losses


def steps(options: Options) -> Iterator[list[Tensor]]:
    """Yield the batches of each step, epoch after epoch; the last step of an epoch may be short."""
    loader: DataLoader[Tensor] = DataLoader(paragraphs(train=True), batch_size=options.batch_size, collate_fn=padded)
    while True:
        batches = iter(loader)
        while step := list(islice(batches, options.accumulation_steps)):
            yield step


def share_of_lr(number: int, options: Options) -> float:
    """Return the learning rate of a step as a share of the highest: a linear warm-up, then half a cosine."""
    if number < options.warmup_steps:
        return number / options.warmup_steps
    done = (number - options.warmup_steps) / (options.num_steps - options.warmup_steps)
    return 0.5 * (1 + cos(pi * done))


if __name__ == "__main__":
    print(train(Options(), dtype=torch.bfloat16)[-1])
