"""Random numbers: one seed for all generators, seeds derived from it, and their states."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def set_global_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (every device) in this process.

    >>> set_global_seed(42); a = torch.rand(1); set_global_seed(42); bool(a == torch.rand(1))
    True
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Hash `seed` and `parts` into a 63-bit seed: the same on every machine, unrelated for other parts.

    >>> derive_seed(42, "epoch", 1) == derive_seed(42, "epoch", 1) != derive_seed(42, "epoch", 2)
    True
    """
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rng_state() -> dict[str, Any]:
    """Read the state of every generator of this process, in types that ``weights_only`` loading accepts."""
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, cached_gaussian),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what :func:`rng_state` read."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def keep_rng() -> Iterator[None]:
    """Leave every generator as it was, whatever the body draws."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
