"""Random numbers: one seed for all generators, seeds derived from it, and their states."""

from __future__ import annotations

import ctypes
import hashlib
import math
import operator
import random
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from typing import Any, NamedTuple

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
    seed = operator.index(seed)  # also of NumPy
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
    np.random.set_state((kind, _as_words(keys), *rest))
    torch.set_rng_state(state["torch"])
    set_gpu_rng_states(state)


def _as_tensor(words: Any) -> torch.Tensor:
    # Signed: torch does not load unsigned tensors with weights_only.
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


def _as_words(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return tensor.numpy().view(np.uint32)


@contextmanager
def keep_rng() -> Iterator[None]:
    """Restore every generator after the body; if the body fails, as far as a failed device allows."""
    state = rng_state()
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # would hide the error of the body
            set_rng_state(state)
        raise
    set_rng_state(state)


class CPUState:
    """State of torch's, Python's and NumPy's CPU generators.

    Attributes:
        torch: that of torch's.
    """

    def __init__(self) -> None:
        self.torch = torch.default_generator.get_state()
        self._python, self._numpy = _python_state(), _numpy_state()

    def read(self, names: Collection[str]) -> None:
        """Replace the states of the generators in `names` by their current ones."""
        if "torch" in names:
            self.torch = torch.default_generator.get_state()
        if "python" in names:
            self._python = _python_state()
        if "numpy" in names:
            self._numpy = _numpy_state()

    def moved(self, apart_from: Collection[str] = ()) -> set[str]:
        """Return the names of generators that have changed; those in `apart_from` are not checked."""
        moved = set()
        if "torch" not in apart_from:
            now = torch.default_generator.get_state()
            if bytes(self.torch.numpy()) != bytes(now.numpy()):  # torch.equal takes 18 microseconds
                moved.add("torch")
        if "python" not in apart_from and self._python != _python_state():
            moved.add("python")
        if "numpy" not in apart_from and self._numpy != _numpy_state():
            moved.add("numpy")
        return moved

    def restore(self, names: Collection[str] = tuple(GENERATORS)) -> None:
        """Restore the generators in `names`."""
        if "torch" in names:
            torch.default_generator.set_state(self.torch)
        if "python" in names:
            _set_python_state(self._python)
        if "numpy" in names:
            _set_numpy_state(self._numpy)


class Generators:
    """States of all generators of this process, to be restored soon: it takes a tenth of the time of
    :func:`rng_state`."""

    def __init__(self) -> None:
        self._cpu, self._gpus = CPUState(), gpu_rng_states()

    def restore(self) -> None:
        """Restore them."""
        self._cpu.restore(self._cpu.moved())
        set_gpu_rng_states(self._gpus)


# Python and NumPy copy 624 numbers one by one, which takes them 25 to 100 microseconds. Their states are therefore read
# and written where they are in memory, if they are found there.
_python_generator: Any = random.random.__self__  # type: ignore[attr-defined]  # the one behind the module's functions


def _memory(address: int, kind: Any) -> memoryview:
    """Return a view of what is at an address, as bytes."""
    return memoryview(kind.from_address(address)).cast("B")


_Words = ctypes.c_uint32 * 625  # of a Mersenne Twister: 624 words and the position in them, first or last


def _find_python_words() -> memoryview | None:
    """Find the position and words of Python's generator in memory; None if they are not where CPython has them."""
    if type(_python_generator).__basicsize__ < object.__basicsize__ + ctypes.sizeof(_Words):
        return None
    _, (*words, position), _ = random.getstate()
    there = _memory(id(_python_generator) + object.__basicsize__, _Words)
    return there if there.cast("I").tolist() == [position, *words] else None


_python_words = _find_python_words()


def _python_state() -> Any:
    if _python_words is None:
        return random.getstate()
    return bytes(_python_words), _python_generator.gauss_next  # Gaussians are drawn in pairs, the second is kept


def _set_python_state(state: Any) -> None:
    if _python_words is None:
        random.setstate(state)
    else:
        _python_words[:], _python_generator.gauss_next = state


@cache  # NumPy loads its random module on first use
def _numpy_gaussian() -> memoryview | None:
    """Find the second Gaussian of a pair, which NumPy keeps in the object behind its functions; None if it does not."""
    pattern = struct.pack("id", 1, math.pi)  # whether it is there, and its value
    generator = np.random.rand.__self__  # type: ignore[attr-defined]
    before: Any = np.random.get_state()
    try:
        np.random.set_state((*before[:3], 1, math.pi))
        content = bytes(_memory(id(generator), ctypes.c_char * type(generator).__basicsize__))
    finally:
        np.random.set_state(before)
    place = content.find(pattern)
    return _memory(id(generator) + place, ctypes.c_char * len(pattern)) if place > 0 else None


def _numpy_state() -> Any:
    known, words = _numpy_generator_and_words
    if np.random.get_bit_generator() is not known:  # type: ignore[attr-defined]  # NumPy's stubs lack it
        words = _numpy_words()
    gaussian = _numpy_gaussian()
    if gaussian is None:
        state: Any = np.random.get_state()
        return state[0], state[1].tobytes(), *state[2:]
    return bytes(words), bytes(gaussian)


def _set_numpy_state(state: Any) -> None:
    gaussian = _numpy_gaussian()
    if gaussian is None:
        kind, keys, *rest = state
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    else:
        words = _numpy_words()
        with _numpy_generator_and_words[0].lock:  # another thread may draw
            words[:], gaussian[:] = state


_NO_WORDS = memoryview(b"")
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
    _numpy_generator_and_words = generator, _memory(generator.ctypes.state_address, _Words)
    return _numpy_generator_and_words[1]


class _Marks(NamedTuple):
    """Places in memory of the marks of Python's and NumPy's generators."""

    python: memoryview
    numpy: memoryview
    gaussian: memoryview  # NumPy's
    generator: Any  # NumPy's


_marks: _Marks | None = None


def python_and_numpy_mark() -> tuple[Any, Any]:
    """Return for Python's and for NumPy's generator what changes with each number drawn; faster than their states.

    It is the position, three words beside it, and the second Gaussian of a pair: when a position comes back, all words
    are new.
    """
    marks = _marks
    if marks is None or np.random.get_bit_generator() is not marks.generator:  # type: ignore[attr-defined]
        return _find_marks()
    python, numpy, gaussian, _ = marks
    return (python.tobytes(), _python_generator.gauss_next), (numpy.tobytes(), gaussian.tobytes())


def _find_marks() -> tuple[Any, Any]:
    global _marks
    numpy_words, gaussian = _numpy_words(), _numpy_gaussian()
    if gaussian is None or _python_words is None:
        return _python_state(), _numpy_state()
    _marks = _Marks(_python_words[:16], numpy_words[-16:], gaussian, _numpy_generator_and_words[0])
    return python_and_numpy_mark()


@contextmanager
def keep_cpu_rng() -> Iterator[None]:
    """Restore torch's, Python's and NumPy's CPU generators after the body."""
    state = CPUState()
    try:
        yield
    finally:
        state.restore()
