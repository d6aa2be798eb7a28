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


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators: what a data set draws from; 10 microseconds."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Read the state of every generator of this process, in types that ``weights_only`` loading accepts; 10 KB."""
    version, words, python_gaussian = random.getstate()
    kind, keys, position, has_gauss, numpy_gaussian = np.random.get_state()
    return {
        "python": (version, _as_tensor(words), python_gaussian),
        "numpy": (kind, _as_tensor(keys), position, has_gauss, numpy_gaussian),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what :func:`rng_state` read."""
    version, words, python_gaussian = state["python"]
    kind, keys, *rest = state["numpy"]
    random.setstate((version, tuple(_as_words(words).tolist()), python_gaussian))
    np.random.set_state((kind, _as_words(keys), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def _as_tensor(words: Any) -> torch.Tensor:
    # Signed: torch does not load unsigned ones with weights_only.
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


def _as_words(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return tensor.numpy().view(np.uint32)


@contextmanager
def keep_rng() -> Iterator[None]:
    """Leave every generator as it was, whatever the body draws."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


@contextmanager
def keep_cpu_rng() -> Iterator[None]:
    """Leave Python's, NumPy's and torch's CPU generators as they were; 0.2 ms, most of it NumPy's."""
    of_python, of_torch = random.getstate(), torch.get_rng_state()
    of_numpy: Any = np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
