"""Random numbers: one seed for all generators, seeds derived from it, and their states."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def set_global_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (every device) in this process with `seed`.

    Raises:
        ValueError: it is none that torch takes.

    >>> set_global_seed(42); a = torch.rand(1); set_global_seed(42); bool(a == torch.rand(1))
    True
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"expected a seed from -2**63 to 2**64 - 1, which is what torch takes, got {seed}")
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


_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio
_64_BITS = 0xFFFFFFFFFFFFFFFF


def sample_seed(base: int, position: int) -> int:
    """Mix a sample's position into `base`, of :func:`derive_seed`, in a microsecond where a hash takes 20.

    A multiple of the golden ratio, as in Steele, Lea & Flood's SplitMix (2014), with its high half folded in.

    >>> len({sample_seed(3, position) for position in range(10_000)})
    10000
    """
    spread = (base + position) * _GOLDEN & _64_BITS
    return (spread ^ spread >> 32) >> 1


def sample_seeds(base: int, positions: range) -> list[int]:
    """Return `sample_seed` of each of `positions`, in a tenth of a microsecond for each.

    >>> sample_seeds(2**63 - 1, range(7, 70, 3)) == [sample_seed(2**63 - 1, each) for each in range(7, 70, 3)]
    True
    """
    spread, step = (base + positions.start) * _GOLDEN & _64_BITS, positions.step * _GOLDEN
    seeds = []
    for _ in positions:
        seeds.append((spread ^ spread >> 32) >> 1)
        spread = spread + step & _64_BITS
    return seeds


# What a data set draws from, and how it is seeded. Amid other work torch's takes 2 microseconds, the others 9 and 13.
GENERATORS: dict[str, Callable[[int], object]] = {
    "torch": torch.default_generator.manual_seed,
    "python": random.seed,
    "numpy": lambda seed: np.random.seed(seed % 2**32),
}


def seed_generators(seed: int) -> None:
    """Seed torch's, Python's and NumPy's CPU generators."""
    for seed_one in GENERATORS.values():
        seed_one(seed)


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


class CPUState:
    """State of torch's, Python's and NumPy's CPU generators."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), _numpy_state()

    def moved(self, apart_from: Collection[str] = ()) -> set[str]:
        """Name those that are in another state by now; `apart_from` those that need not be looked at."""
        moved = {
            "torch": lambda: not torch.equal(self._torch, torch.get_rng_state()),
            "python": lambda: self._python != random.getstate(),
            "numpy": lambda: not _is_same(self._numpy, _numpy_state()),
        }
        return {name for name in GENERATORS if name not in apart_from and moved[name]()}

    def restore(self) -> None:
        """Put them back; NumPy's, which takes 100 microseconds, if it has moved."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if _numpy_state() is not self._numpy:
            np.random.set_state(self._numpy)


_last_numpy_state: tuple[bytes, Any] = b"", None


def _numpy_state() -> Any:
    """Read NumPy's state; the same object as before if nothing was drawn since.

    NumPy takes 90 microseconds for it, so its 624 words and the position in them are looked at in memory first. Of
    Gaussians it draws two and keeps one, which the words do not tell: with one in store it is read anew.
    """
    global _last_numpy_state
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's stubs lack it
    words = ctypes.string_at(generator.ctypes.state_address, 625 * 4)
    last_words, state = _last_numpy_state
    if words != last_words or state[3]:
        state = np.random.get_state()
        _last_numpy_state = words, state
    return state


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (one[2:] == other[2:] and np.array_equal(one[1], other[1]))


@contextmanager
def keep_cpu_rng() -> Iterator[None]:
    """Leave torch's, Python's and NumPy's CPU generators as they were."""
    state = CPUState()
    try:
        yield
    finally:
        state.restore()
