"""Random numbers: one seed for all generators, seeds derived from it, and their states."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from runnerkit.support.accelerator import gpu_rng_states, set_gpu_rng_states


def set_global_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (every device) in this process with `seed`.

    Raises:
        ValueError: torch does not accept it.

    >>> set_global_seed(42); a = torch.rand(1); set_global_seed(42); bool(a == torch.rand(1))
    True
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"expected a seed from -2**63 to 2**64 - 1, the range of torch, got {seed}")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@lru_cache(maxsize=64)  # called for each batch
def derive_seed(seed: int, *parts: int | str) -> int:
    """Hash `seed` and `parts` into a 63-bit seed: the same on every machine, unrelated to that of other parts.

    >>> derive_seed(42, "epoch", 1) == derive_seed(42, "epoch", 1) != derive_seed(42, "epoch", 2)
    True
    """
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# Distance between the seeds of neighboring places in an epoch. Large, since data sets seed other generators with
# torch.initial_seed() + index; odd, since torch and NumPy use seeds modulo 2**32.
SEED_STRIDE = 1_048_583
_NUMPY_ALONE = 0x9E3779B9  # torch and NumPy draw the same numbers from the same seed

# Seeding functions of the generators that data sets use. Between other work they take 2, 9 and 13 microseconds.
GENERATORS: dict[str, Callable[[int], object]] = {
    "torch": torch.default_generator.manual_seed,
    "python": random.seed,
    "numpy": lambda seed: np.random.seed(seed % 2**32 ^ _NUMPY_ALONE),
}


def seed_generators(seed: int) -> None:
    """Seed torch's, Python's and NumPy's CPU generators such that each draws different numbers."""
    for seed_one in GENERATORS.values():
        seed_one(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of every generator of this process, in types that ``weights_only`` loading accepts; 10 KB.

    Raises:
        RuntimeError: NumPy's global functions do not use their default generator.
    """
    _numpy_words()
    version, words, python_gaussian = random.getstate()
    kind, keys, position, has_gauss, numpy_gaussian = np.random.get_state()
    return {
        "python": (version, _as_tensor(words), python_gaussian),
        "numpy": (kind, _as_tensor(keys), position, has_gauss, numpy_gaussian),
        "torch": torch.get_rng_state(),
        **gpu_rng_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states from :func:`rng_state`; only those of GPUs that are visible now."""
    version, words, python_gaussian = state["python"]
    kind, keys, *rest = state["numpy"]
    random.setstate((version, tuple(_as_words(words).tolist()), python_gaussian))
    _set_numpy_state((kind, _as_words(keys), *rest))
    torch.set_rng_state(state["torch"])
    set_gpu_rng_states(state)


def _as_tensor(words: Any) -> torch.Tensor:
    # Signed: torch does not load unsigned tensors with weights_only.
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


def _as_words(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return tensor.numpy().view(np.uint32)


@contextmanager
def keep_rng() -> Iterator[None]:
    """Restore every generator after the body."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


class CPUState:
    """State of torch's, Python's and NumPy's CPU generators."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python, self._numpy = _python_state(), _numpy_state()

    def moved(self, apart_from: Collection[str] = ()) -> set[str]:
        """Return the names of generators that have changed; those in `apart_from` are not checked."""
        moved = set()
        if "torch" not in apart_from and _bytes(self._torch) != _bytes(torch.default_generator.get_state()):
            moved.add("torch")
        if "python" not in apart_from and not _is_same(self._python, _python_state()):
            moved.add("python")
        if "numpy" not in apart_from and not _is_same(self._numpy, _numpy_state()):
            moved.add("numpy")
        return moved

    def restore(self, names: Collection[str] = tuple(GENERATORS)) -> None:
        """Restore the generators in `names`; Python's and NumPy's, which take longer, only if changed."""
        if "torch" in names:
            torch.default_generator.set_state(self._torch)
        if "python" in names and _python_state() is not self._python:
            random.setstate(self._python)
        if "numpy" in names and _numpy_state() is not self._numpy:
            _set_numpy_state(self._numpy)


_python_generator: Any = random.random.__self__  # type: ignore[attr-defined]  # the one behind the module's functions


def _words_at(address: int) -> memoryview:
    """Return a view of a Mersenne Twister in memory: 624 words and the position in them, first or last."""
    return memoryview((ctypes.c_uint32 * 625).from_address(address)).cast("B")


_NO_WORDS = memoryview(b"")


def _find_python_words() -> memoryview | None:
    """Find the position and words of Python's generator in memory; None if they are not where CPython has them."""
    address = id(_python_generator) + object.__basicsize__
    if type(_python_generator).__basicsize__ < object.__basicsize__ + 625 * 4:
        return None
    _, (*words, position), _ = random.getstate()
    words_there = _words_at(address)
    return words_there if words_there.cast("I").tolist() == [position, *words] else None


_python_words = _find_python_words()
_last_python_state: tuple[bytes, Any] = b"", None


def _python_state() -> Any:
    """Return Python's state; the same object as before if nothing was drawn since.

    Reading its 625 numbers as Python integers takes 50 microseconds between other work, so they are first compared
    in memory, together with the Gaussian that may be cached.
    """
    global _last_python_state
    if _python_words is None:
        return random.getstate()
    last_words, state = _last_python_state
    words = bytes(_python_words)  # before the state: a signal's handler may draw in between
    if words != last_words or state[2] != _python_generator.gauss_next:
        state = random.getstate()
        _last_python_state = words, state
    return state


_last_numpy_state: tuple[bytes, Any] = b"", None


def _numpy_state() -> Any:
    """Return NumPy's state; the same object as before if nothing was drawn since.

    NumPy takes 90 microseconds for it, so its 624 words and the position in them are first compared in memory. NumPy
    draws Gaussians in pairs and caches one, which the words do not show; while one is cached, the state is read again.
    If ``np.random.set_state`` restores the words compared last, along with a cached Gaussian, that Gaussian is lost.
    """
    global _last_numpy_state
    words = bytes(_numpy_words())
    last_words, state = _last_numpy_state
    if words != last_words or state[3]:
        state = np.random.get_state()
        _last_numpy_state = words, state
    return state


def _set_numpy_state(state: Any) -> None:
    global _last_numpy_state
    np.random.set_state(state)
    _last_numpy_state = b"", None  # the same words may come with another cached Gaussian


_numpy_generator_and_words: tuple[Any, memoryview] = None, _NO_WORDS


def _numpy_words() -> memoryview:
    global _numpy_generator_and_words
    known, words = _numpy_generator_and_words
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's stubs lack it
    if generator is known:
        return words
    if type(generator) is not np.random.MT19937:  # NumPy itself checks the name
        raise RuntimeError(
            "expected NumPy's global functions to draw from MT19937, as they do by default, got "
            f"{type(generator).__name__}: call np.random.set_bit_generator(np.random.MT19937()), and use the "
            "other one through np.random.Generator"
        )
    _numpy_generator_and_words = generator, _words_at(generator.ctypes.state_address)
    return _numpy_generator_and_words[1]


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()  # to compare them: torch.equal takes 18 microseconds


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (one[2:] == other[2:] and np.array_equal(one[1], other[1]))


@contextmanager
def keep_cpu_rng() -> Iterator[None]:
    """Restore torch's, Python's and NumPy's CPU generators after the body."""
    state = CPUState()
    try:
        yield
    finally:
        state.restore()
