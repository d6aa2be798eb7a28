"""The values that a checkpoint can hold: tensors and plain values, which load without running code."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runnerkit.support.device_move import rebuilt

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_DICTS = (OrderedDict, Counter, dict)  # types that torch.load(weights_only=True) restores; the first match counts
_LISTS = (list, torch.Size, tuple, set)


def as_plain(state: Any, place: str = "") -> Any:
    """Reduce `state` to what ``torch.load(weights_only=True)`` reads.

    NumPy's scalars become Python's, its arrays tensors (which may share their memory), subclasses of numbers, strings,
    dicts, lists and tuples their base classes. Tensors stay the same objects.

    Args:
        place: the place of `state` in the checkpoint, for errors.
    Raises:
        TypeError: it holds something else; the message has the place.

    >>> import numpy as np
    >>> as_plain({"lr": np.float64(0.5), "seen": {np.int64(3)}, "sums": np.zeros(1)})
    {'lr': 0.5, 'seen': {3}, 'sums': tensor([0.], dtype=torch.float64)}
    """
    kind = type(state)
    if kind in _SCALARS or kind is bytearray or (isinstance(state, torch.Tensor) and _is_plain(state)):
        return state
    if isinstance(state, dict):
        return _plain_dict(state, place)
    if isinstance(state, _LISTS):
        if kind in _LISTS and _SCALARS.issuperset(map(type, state)):
            return state  # thousands of numbers
        base: Any = next(each for each in _LISTS if isinstance(state, each))
        words = f"an element of {place}" if base is set else place
        return base([as_plain(each, words if base is set else f"{place}[{i}]") for i, each in enumerate(state)])
    if isinstance(state, np.generic | np.ndarray):
        return _plain_array(state, place)
    for scalar, convert in _SUBCLASSED.items():
        if isinstance(state, scalar):
            return convert(state)
    if not _is_loadable(state):
        raise _refusal(place, f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))
    return state


# Not `str(state)` and the like, which an enum may override.
_SUBCLASSED: dict[type, Any] = {
    str: str.__str__, int: int.__int__, float: float.__float__, complex: complex.__complex__, bytes: bytes.__bytes__,
}  # fmt: skip


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return not vars(tensor) or _is_loadable(tensor)  # attributes are saved with it
    return (
        type(tensor) in torch.serialization.get_safe_globals()
    )  # such as DTensor; a copy in memory would be expensive


def _plain_dict(state: dict[Any, Any], place: str) -> Any:
    plain: Any = next(each for each in _DICTS if isinstance(state, each))()
    for key, value in state.items():
        if type(key) not in _SCALARS:
            key = as_plain(key, f"a key of {place or 'the state'}")
        plain[key] = as_plain(value, f"{place}[{key!r}]" if place else str(key))
    if isinstance(state, OrderedDict) and vars(state):  # the module versions in a model's state dict
        vars(plain).update(_plain_dict(vars(state), place))
    return plain


def _plain_array(state: Any, place: str) -> Any:
    if state.ndim == 0 and type(number := state.item()) in _SCALARS:
        return number
    try:
        if type(state) is np.ndarray:  # subclasses hold more than numbers, such as a mask
            return torch.from_numpy(np.require(state, requirements=("C", "W")))
    except TypeError:
        pass  # of strings or objects
    raise _refusal(place, f"{type(state).__module__}.{type(state).__qualname__} ({state.dtype})")


def _is_loadable(value: Any) -> bool:
    """Return whether torch loads the value by itself: a dtype, a device, a type in torch's safe globals."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # pickling a type of unknown origin may raise anything
        return False
    return True


def _refusal(place: str, kind: str) -> TypeError:
    return TypeError(
        f"{place or 'the state'} is of type {kind}, which a checkpoint cannot hold, as loading it could run code; "
        "return tensors, numbers, strings, and lists, tuples, sets or dicts of them, from state_dict()"
    )


def foreign_types(path: Path) -> list[str]:
    """List the names in a file that would not be loaded, without running code; empty if torch did not write it."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # may raise anything on bytes of unknown origin
        return []


def copied(state: Any, *, known: dict[Any, torch.Tensor] | None = None) -> Any:
    """Copy a state to CPU memory that nothing else uses; tensors that share memory still do in the copy.

    >>> weight = torch.zeros(2)
    >>> copy = copied({"a": weight, "b": weight})
    >>> _ = weight.add_(1)
    >>> copy["a"].tolist(), copy["a"] is copy["b"]
    ([0.0, 0.0], True)
    """
    known = {} if known is None else known
    if isinstance(state, torch.Tensor):
        if state.layout is not torch.strided:  # without an address
            return state.detach().to("cpu", copy=True)
        identity = state.device, state.data_ptr(), state.dtype, state.shape, state.stride()
        if identity not in known or not state.numel():
            known[identity] = state.detach().to("cpu", copy=True)
        return known[identity]
    if isinstance(state, dict | list | tuple):
        return rebuilt(state, partial(copied, known=known))
    return deepcopy(state)
