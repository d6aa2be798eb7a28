"""Weights on their way from files, whoever wrote these, into modules."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import copy as shallow_copy
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from runnerkit.storage.checkpoint import CheckpointFolder
from runnerkit.storage.checkpoint_file import is_checkpoint, load_checkpoint
from runnerkit.storage.plain_state import copied
from runnerkit.storage.safetensors_file import SUFFIX, read_safetensors, write_safetensors
from runnerkit.types import Model, StateDict

logger = logging.getLogger(__name__)

Which = Literal["best", "last"]

_COMPILED = "_orig_mod"  # what torch.compile puts into names
_WRAPPED = "module."  # what DataParallel and DistributedDataParallel put before them
_NUM_LISTED = 12


def load_weights(
    model: Model,
    source: str | PathLike[str],
    *,
    which: Which = "best",
    strict: bool = True,
    prefix: str = "",
) -> None:
    """Load weights into `model`, or into several by key.

    Prefixes of wrappers in the names, ``module.`` and ``_orig_mod.``, do not matter.

    Args:
        source: a checkpoint, a file of weights (``.safetensors`` too), or a logdir.
        which: of a logdir's checkpoints.
        strict: refuse weights that do not fit; else take those that do, and warn of the others.
        prefix: take the weights whose names begin with it, without it: "encoder." for one part of another model.
    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the file is damaged; or its weights do not fit, each name in words, and the model is as it was.
    """
    path = find_weights(source, which=which)
    state = read_weights(path)
    if not isinstance(model, dict):
        _load(model, state, strict=strict, prefix=prefix, source=str(path))
        return
    by_key = _by_key(state, model)
    both = sorted(model.keys() & by_key.keys())
    words = f"{path} holds the models {sorted(by_key)}, the runner has {sorted(model)}"
    if not both or (strict and by_key.keys() != model.keys()):
        raise ValueError(words)
    if len(both) < len(model):
        logger.warning("%s: loaded are %s", words, both)
    for key in both:
        _load(model[key], by_key[key], strict=strict, prefix=prefix, source=f"{path}, model {key!r},")


def export_safetensors(source: str | PathLike[str], out: str | PathLike[str], *, which: Which = "best") -> Path:
    """Save a checkpoint's weights as ``.safetensors``, which other libraries read; a model among several has its key
    before the names: "generator.0.weight".

    Args:
        source: a checkpoint, or a logdir.
        out: the file, such as "model.safetensors".
        which: of a logdir's checkpoints.
    Raises:
        FileNotFoundError, ValueError: nothing is there, or nothing whole.
        ImportError: the package safetensors is missing.
    """
    out = Path(out)
    if out.suffix != SUFFIX:
        raise ValueError(f"{out} must end in {SUFFIX}")
    flat: StateDict = {}
    for name, value in read_weights(find_weights(source, which=which)).items():
        flat |= {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {name: value}
    write_safetensors(flat, out)
    return out


def find_weights(source: str | PathLike[str], *, which: Which = "best") -> Path:
    """Resolve a file or a sharded checkpoint to itself, a logdir to its checkpoint of that name.

    Raises:
        FileNotFoundError, ValueError: it is not there, or damaged.
    """
    path = Path(source)
    if which not in ("best", "last"):
        raise ValueError(f"which must be 'best' or 'last', got {which!r}")
    if is_checkpoint(path):
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint, file of weights or logdir")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return CheckpointFolder(folder).named(which)


def read_weights(path: Path) -> StateDict:
    """Load the weights of a checkpoint of any mode, of a plain ``state_dict``, or of ``.safetensors``, to the CPU."""
    if path.suffix == SUFFIX:
        return read_safetensors(path)
    state: Any = load_checkpoint(path)
    for name in ("model_state_dict", "state_dict"):  # ours; what others call it
        if isinstance(state, dict) and isinstance(state.get(name), dict):
            state = state[name]
    if not isinstance(state, dict) or not state:
        raise ValueError(f"{path} holds no weights by name but a {type(state).__name__}")
    return state


def without_compiled(state: StateDict) -> StateDict:
    """Take ``_orig_mod.`` out of the names, wherever it stands.

    >>> without_compiled({"0._orig_mod.weight": 1.0})
    {'0.weight': 1.0}
    """
    if not any(_COMPILED in name.split(".") for name in state):
        return state
    bare = shallow_copy(state)  # with the versions of modules, which a model's state has as an attribute
    bare.clear()
    bare.update(zip(_without_compiled(state), state.values(), strict=True))
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        bare._metadata = dict(zip(_without_compiled(metadata), metadata.values(), strict=True))  # type: ignore[attr-defined]  # torch's own
    return bare


def under_names_of(module: nn.Module, state: StateDict) -> StateDict:
    """Give weights the names that `module` has for them, with the prefixes that are its own and no others."""
    names = list(module.state_dict())
    own = dict(zip(_bare(names), names, strict=True))
    named = shallow_copy(state)
    named.clear()
    given = [name for name in state if name != "n_averaged" or name in own]  # AveragedModel's counter
    named.update((own.get(bare, bare), state[name]) for bare, name in zip(_bare(given), given, strict=True))
    return named


def _bare(names: list[str]) -> list[str]:
    bare = _without_compiled(names)
    while bare and all(name.startswith(_WRAPPED) for name in bare):
        bare = _without_compiled(name.removeprefix(_WRAPPED) for name in bare)
    return bare


def _without_compiled(names: Iterable[str]) -> list[str]:
    return [".".join(part for part in name.split(".") if part != _COMPILED) for name in names]


def _by_key(state: StateDict, models: dict[str, nn.Module]) -> dict[str, StateDict]:
    if all(isinstance(each, dict) for each in state.values()):
        return state
    parts = {key: _part(state, f"{key}.") for key in models}  # of a flat file
    rest = {name for name in state if not any(name.startswith(f"{key}.") for key in models)}
    return {key: part for key, part in parts.items() if part} | ({"": state} if rest else {})


def _part(state: StateDict, prefix: str) -> StateDict:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _load(module: nn.Module, state: StateDict, *, strict: bool, prefix: str, source: str) -> None:
    if prefix:
        bare = dict(zip(_bare(list(state)), state.values(), strict=True))
        state = _part(bare, prefix)
        if not state:
            raise ValueError(f"{source} has no weights whose names begin with {prefix!r}: {listed(bare)}")
    state = under_names_of(module, state)
    own = module.state_dict()
    shapes = {
        name: f"{name} is {tuple(state[name].shape)}, the model's is {tuple(own[name].shape)}"
        for name in own.keys() & state.keys()
        if _differs(own[name], state[name])
    }
    fitting = {name: value for name, value in state.items() if name not in shapes}
    if not own.keys() & fitting.keys():
        raise ValueError(f"{source} has none of the model's weights, {listed(own)}, but {listed(state)}")
    # Torch has the last word, since modules may take other names than they give. It loads what fits even if it fails.
    before = copied(own) if strict and (shapes or own.keys() != state.keys()) else None
    found = module.load_state_dict(fitting, strict=False)
    words = {
        "missing": [name for name in found.missing_keys if name not in shapes],
        "unexpected": found.unexpected_keys,
        "of another shape": [shapes[name] for name in own if name in shapes],
    }
    misfits = "".join(f"\n  {what}: {listed(names)}" for what, names in words.items() if names)
    if misfits and before is not None:
        module.load_state_dict(before)
        raise ValueError(f"{source} does not fit the model; strict=False takes what fits{misfits}")
    if misfits:
        logger.warning("of %s only what fits the model was loaded%s", source, misfits)


def _differs(own: Any, given: Any) -> bool:
    are_tensors = isinstance(own, Tensor) and isinstance(given, Tensor)
    return are_tensors and not is_lazy(own) and own.shape != given.shape


def listed(names: Iterable[str], num_listed: int = _NUM_LISTED) -> str:
    """Write the first names, and how many more there are.

    >>> listed("abc", 2)
    'a, b and 1 more'
    """
    names = list(names)
    more = f" and {len(names) - num_listed} more" if len(names) > num_listed else ""
    return ", ".join(names[:num_listed]) + more
