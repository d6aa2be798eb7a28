"""Loading of weights from files of any origin into modules."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from runnerkit.checkpoints.file import is_checkpoint, is_foreign, load_checkpoint
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.checkpoints.names import bare_names, under_names_of, with_tied, without_compiled
from runnerkit.checkpoints.plain_state import copied
from runnerkit.checkpoints.pretrained_folder import is_index, pretrained_weights, read_indexed
from runnerkit.checkpoints.safetensors_file import SUFFIX, read_safetensors, write_safetensors
from runnerkit.checkpoints.trainable import completed
from runnerkit.seeding.initialization import is_on_meta, materialized
from runnerkit.storage.claims import readable
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.storage.remote.urls import shown
from runnerkit.support.arguments import check_paths
from runnerkit.types import Model, StateDict

logger = logging.getLogger(__name__)

Which = Literal["best", "last"]

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

    The wrapper prefixes ``module.`` and ``_orig_mod.`` in the names are ignored.

    Args:
        source: a checkpoint, a file of weights (also ``.safetensors``), a logdir, or a folder of a pretrained model,
            which has ``.safetensors`` files, or its index file. A URL such as "s3://bucket/run" is copied first.
        which: the checkpoint of a logdir.
        strict: raise if weights do not fit; otherwise load those that do, and warn about the others.
        prefix: load weights whose names begin with it, and remove it: "encoder." for one part of another model.
    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the file is damaged, or its weights do not fit: names are listed, and the model is not changed.
    """
    check_paths("load", source=source)
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
        logger.warning("%s: loaded only %s", words, both)
    for key in both:
        _load(model[key], by_key[key], strict=strict, prefix=prefix, source=f"{path}, model {key!r},")


def export_safetensors(source: str | PathLike[str], out: str | PathLike[str], *, which: Which = "best") -> Path:
    """Save a checkpoint's weights as ``.safetensors``, which other libraries read; with several models, names start
    with the model's key: "generator.0.weight".

    Args:
        source: a checkpoint, or a logdir.
        out: the file, such as "model.safetensors".
        which: the checkpoint of a logdir.
    Raises:
        FileNotFoundError, ValueError: nothing is there, or it is damaged.
        ImportError: the package safetensors is missing.
    """
    if Path(out).suffix != SUFFIX:
        raise ValueError(f"{out} must end in {SUFFIX}")
    flat: StateDict = {}
    for name, value in read_weights(find_weights(source, which=which)).items():
        flat |= {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {name: value}
    with written(out) as path:
        write_safetensors(dict(sorted(flat.items())), path)
    return name_of(out)


def find_weights(source: str | PathLike[str], *, which: Which = "best") -> Path:
    """Return the path of a file or sharded checkpoint itself, of a logdir's checkpoint of that name, or of the file of
    weights or index in a pretrained model's folder.

    Raises:
        FileNotFoundError, ValueError: it is not there, or damaged.
    """
    if which not in ("best", "last"):
        raise ValueError(f"which must be 'best' or 'last', got {which!r}")
    path = readable(source, which=which)
    if is_checkpoint(path) or is_foreign(path):
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{shown(path)}: no such checkpoint, file of weights or logdir")
    if (weights := pretrained_weights(path)) is not None:
        return weights
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return CheckpointFolder(folder).named(which)


def read_weights(path: Path, *, mapped: bool = False) -> StateDict:
    """Load the weights of a checkpoint of any mode, of a plain ``state_dict``, or of ``.safetensors``, to the CPU.

    Args:
        path: of a file, an index of ``.safetensors`` files, or a sharded checkpoint.
        mapped: map those of a file into memory, where they are read when they are used; ``.safetensors`` always are.
    """
    if is_index(path):
        return read_indexed(path)
    if path.suffix == SUFFIX:
        return read_safetensors(path)
    if is_foreign(path):
        from runnerkit.checkpoints.sharded import load_foreign  # late, as it imports much of torch.distributed

        return load_foreign(path)
    return weights_in(load_checkpoint(path, mapped=mapped), path)


def weights_in(state: Any, path: Path) -> StateDict:
    """Return the weights in the state that a checkpoint or another file at `path` holds."""
    for name in ("model_state_dict", "state_dict"):  # ours; the common name elsewhere
        if isinstance(state, dict) and isinstance(state.get(name), dict):
            state = state[name]
    if not isinstance(state, dict) or not state:
        raise ValueError(f"{path} must hold weights by name, but holds a {type(state).__name__}")
    return state


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
        bare = dict(zip(bare_names(list(state)), state.values(), strict=True))
        state = _part(bare, prefix)
        if not state:
            raise ValueError(f"{source} does not hold weights whose names begin with {prefix!r}: {listed(bare)}")
    with materialized(module) if is_on_meta(module) else nullcontext():
        _load_into(module, state, strict=strict or is_on_meta(module), source=source)


def _load_into(module: nn.Module, state: StateDict, *, strict: bool, source: str) -> None:
    own = module.state_dict()
    if strict:
        state = completed(module, state, without_compiled(own), source=source)
    state = with_tied(module, under_names_of(module, state))
    shapes = {
        name: f"{name} is {tuple(state[name].shape)}, the model's is {tuple(own[name].shape)}"
        for name in own.keys() & state.keys()
        if _differs(own[name], state[name])
    }
    fitting = {name: value for name, value in state.items() if name not in shapes}
    if not own.keys() & fitting.keys():
        raise ValueError(f"{source} has none of the model's weights, {listed(own)}, but {listed(state)}")
    # Torch decides, since modules may accept names other than their own. It loads what fits even if it fails.
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
        raise ValueError(f"{source} does not fit the model; strict=False loads what fits{misfits}")
    if misfits:
        logger.warning("loaded only the weights of %s that fit the model%s", source, misfits)


def _differs(own: Any, given: Any) -> bool:
    are_tensors = isinstance(own, Tensor) and isinstance(given, Tensor)
    return are_tensors and not is_lazy(own) and own.shape != given.shape


def listed(names: Iterable[str], num_listed: int = _NUM_LISTED) -> str:
    """Join the first names, and count the others.

    >>> listed("abc", 2)
    'a, b and 1 more'
    """
    names = list(names)
    more = f" and {len(names) - num_listed} more" if len(names) > num_listed else ""
    return ", ".join(names[:num_listed]) + more
