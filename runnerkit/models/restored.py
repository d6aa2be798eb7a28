"""Restoration of weights and optimizers after trial steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from runnerkit.checkpoints.plain_state import copied


@contextmanager
def restored(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer] = ()) -> Iterator[None]:
    """Restore parameters, buffers and optimizer states on exit, from copies on the CPU that take no GPU memory.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> before = layer.weight.item()
    >>> with restored([layer]):
    ...     nn.init.constant_(layer.weight, before + 1).item() == before
    False
    >>> layer.weight.item() == before
    True
    """
    tensors = [
        (each, each.detach().to("cpu", copy=True))
        for module in modules
        for each in (*module.parameters(), *module.buffers())
    ]
    states = [(each, copied(each.state_dict())) for each in optimizers]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        for optimizer, state in states:
            optimizer.load_state_dict(state)
