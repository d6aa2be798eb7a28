"""Export of weights to a folder that ``from_pretrained`` of Hugging Face's libraries reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runnerkit.checkpoints.file import is_foreign, is_sharded, load_checkpoint
from runnerkit.checkpoints.names import OF_PEFT, bare_names
from runnerkit.checkpoints.pretrained_folder import CONFIG, INDEX, WEIGHTS, replacing
from runnerkit.checkpoints.safetensors_file import write_safetensors
from runnerkit.checkpoints.trainable import is_trainable_part
from runnerkit.checkpoints.weights import Which, find_weights, read_weights, weights_in
from runnerkit.storage.atomic_file import write_text
from runnerkit.storage.claims import readable
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.storage.remote.store import Store
from runnerkit.storage.remote.urls import as_url
from runnerkit.support.component_members import ModuleMembers
from runnerkit.support.torch_internals import uncompiled
from runnerkit.types import StateDict


def export_pretrained(
    source: str | PathLike[str] | nn.Module,
    out: str | PathLike[str],
    *,
    config: Any = None,
    max_shard_size: int | str = "5GB",
    which: Which = "best",
    key: str | None = None,
) -> Path:
    """Save weights and their config as a folder that ``from_pretrained`` reads.

    The folder gets ``config.json`` and ``model.safetensors``, or, for more than `max_shard_size`, files
    ``model-00001-of-00002.safetensors`` and ``model.safetensors.index.json``; from a model that generates text, also
    ``generation_config.json``. Tied weights are stored once, under their first name. An earlier export in the folder is
    replaced once the new one is complete; other files, such as a tokenizer's, stay. Of a sharded checkpoint, the
    weights of one file at a time are in memory. Call it in one process.

    Args:
        source: a checkpoint, a file of weights, a logdir, or a model.
        out: the folder, or its URL.
        config: a dict, the path of a ``config.json`` or its folder, a config of transformers, or a model that has one;
            by default the model `source`. A model also tells which weights are tied, which a sharded checkpoint does
            not. In a config of transformers, "dtype" becomes that of the weights.
        max_shard_size: of one file, in bytes or as "5GB"; a larger weight has a file to itself.
        which: the checkpoint of a logdir.
        key: of the model, if there are several.
    Raises:
        FileNotFoundError: `source` or the file `config` is not there.
        NotADirectoryError: `out` is a file.
        ValueError: `source` is damaged, holds several models or only a part of one, or there is no config.
        ImportError: the package huggingface_hub or safetensors is missing.

    >>> import tempfile
    >>> out = export_pretrained(nn.Linear(4, 2), tempfile.mkdtemp(), config={"width": 4})
    >>> sorted(path.name for path in out.iterdir())
    ['config.json', 'model.safetensors']
    """
    if (url := as_url(out)) is not None:
        with written(url) as local:
            export_pretrained(source, local, config=config, max_shard_size=max_shard_size, which=which, key=key)
            _delete_weights(Store(url))  # of an earlier export, before the new ones are uploaded
        return name_of(out)
    split, out = _splitter(), name_of(out)
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"cannot write {out}: it is a file; pass the path of a folder")
    values = _config_of(config, source)
    state, read = _opened(source, which=which)
    weights = _model_of(state, key, source=f"the {type(source).__name__}" if isinstance(source, nn.Module) else source)
    if isinstance(config, nn.Module):
        weights = _without_tied(weights, config)
    values = _with_dtype(values, weights)
    parts = split(weights, max_shard_size=max_shard_size)
    files: dict[str, str] = {}
    with replacing(out) as folder:
        write_text(folder / CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")
        if (generation := ModuleMembers(source).generation_config) is not None:
            generation.save_pretrained(folder)
        for file, names in parts.filename_to_tensors.items():
            for name in write_safetensors(read({name: weights[name] for name in names}), folder / file):
                files[name] = file
        if parts.is_sharded:
            index = {
                "metadata": {"total_size": parts.metadata["total_size"]},
                "weight_map": dict(sorted(files.items())),
            }
            write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return out


def _delete_weights(store: Store) -> None:
    """Delete the index first, so that what is left is not read as a model."""
    names = [each for each in store.names() if each in (INDEX, WEIGHTS) or fnmatch(each, "model-*-of-*.safetensors")]
    for name in sorted(names, reverse=True):
        store.delete(name)


def _opened(source: str | PathLike[str] | nn.Module, *, which: Which) -> tuple[StateDict, Callable[[StateDict], Any]]:
    """Return weights, and a function that reads those on the meta device among some of them."""
    if isinstance(source, nn.Module):
        state = source.state_dict()
        if any(isinstance(each, Tensor) and each.is_meta for each in state.values()):
            raise ValueError(
                f"the {type(source).__name__} has parameters on the meta device, without values: pass the logdir or a "
                "checkpoint of its run instead"
            )
        return state, dict
    path = find_weights(source, which=which)
    if is_sharded(path) or is_foreign(path):
        from runnerkit.checkpoints.sharded import open_parts  # late, as it imports much of torch.distributed

        opened, read = open_parts(load_checkpoint(path, whole=False) if is_sharded(path) else None, path)
        return weights_in(opened, path), read
    return read_weights(path), dict


def _model_of(state: StateDict, key: str | None, *, source: Any) -> StateDict:
    """Return the weights of one model under their own names."""
    keys = sorted(state) if all(isinstance(each, dict) for each in state.values()) else []
    if key is not None and key not in keys:
        held = f"the models {keys}" if keys else "one model, without a key"
        raise ValueError(f"{source} does not hold a model {key!r}, but {held}")
    if keys and key is None:
        raise ValueError(f"{source} holds the models {keys}: pass the key of one, such as key={keys[0]!r}")
    state = state if key is None else state[key]
    if is_trainable_part(state):
        raise ValueError(
            f"{source} holds the trainable part of a model only: load it into the model with runner.load, and pass "
            "runner.model instead"
        )
    weights = dict(zip(bare_names(list(state)), state.values(), strict=True))
    if any(name.startswith(OF_PEFT) for name in weights):
        raise ValueError(
            f"{source} holds adapters of peft beside the weights that they change: pass "
            "runner.model.merge_and_unload(), after runner.load if it is a checkpoint"
        )
    return weights


def _config_of(config: Any, source: Any) -> dict[str, Any]:
    """Return the values of ``config.json``."""
    if config is None and isinstance(source, nn.Module):
        config = source
    if isinstance(config, nn.Module):
        model = uncompiled(config)
        return {**_config_of(ModuleMembers(model).config, None), "architectures": [type(model).__name__]}
    if isinstance(config, str | PathLike):
        path = readable(config)
        path = path / CONFIG if path.is_dir() else path
        try:
            config = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from error
    elif config is not None and hasattr(config, "to_dict"):
        config = config.to_dict()
    if config is None:
        raise ValueError(
            f"from_pretrained needs a {CONFIG}: pass as config a dict, the path of a {CONFIG}, or a model's, such as "
            "model.config"
        )
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be a dict, a path, or have a method to_dict, got a {type(config).__name__}")
    return dict(config)


def _without_tied(weights: StateDict, model: nn.Module) -> StateDict:
    """Leave out the further names of tied parameters of `model`, whose first name is there."""
    named = list(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, (_, each) in zip(bare_names([name for name, _ in named]), named, strict=True):
        if first.setdefault(id(each), name) != name and first[id(each)] in weights:
            weights = {other: value for other, value in weights.items() if other != name}
    return weights


def _with_dtype(config: dict[str, Any], weights: StateDict) -> dict[str, Any]:
    """Let a config of transformers name the dtype of the weights, to which ``from_pretrained`` converts them."""
    dtypes = {each.dtype for each in weights.values() if isinstance(each, Tensor) and each.is_floating_point()}
    if "model_type" not in config or len(dtypes) != 1:
        return config
    kept = {name: value for name, value in config.items() if name != "torch_dtype"}  # of transformers before 4.56
    return {**kept, "dtype": str(dtypes.pop()).removeprefix("torch.")}


def _splitter() -> Callable[..., Any]:
    try:
        from huggingface_hub import split_torch_state_dict_into_shards
    except ImportError:
        raise ImportError("export_pretrained needs the package huggingface_hub: pip install 'runnerkit[hf]'") from None
    return split_torch_state_dict_into_shards
