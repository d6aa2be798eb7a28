"""The mean of the weights of several checkpoints."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from runnerkit.checkpoints.weights import read_weights
from runnerkit.storage.claims import readable
from runnerkit.storage.remote.urls import as_url, plain_path, shown
from runnerkit.types import StateDict


def average_weights(state_dicts: Sequence[StateDict]) -> StateDict:
    """Average weights in float64; integers, such as a batch norm's counter, are those of the last.

    Args:
        state_dicts: of models with the same names and shapes.
    Raises:
        ValueError: there is none, or names or shapes differ.

    >>> average_weights([{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}])
    {'w': tensor([1.5000])}
    """
    if not state_dicts:
        raise ValueError("average_weights needs one state_dict or more, got none")
    for index, each in enumerate(state_dicts):
        if each.keys() != state_dicts[0].keys():
            names = sorted(each.keys() ^ state_dicts[0].keys())
            raise ValueError(f"state_dicts[{index}] and state_dicts[0] differ in the names {names}")
        names = [name for name, value in each.items() if value.shape != state_dicts[0][name].shape]
        if names:
            raise ValueError(f"state_dicts[{index}] and state_dicts[0] differ in the shapes of {names}")
    return {name: _mean([each[name] for each in state_dicts]) for name in state_dicts[0]}


def get_averaged_weights_by_path_mask(path_mask: str, logdir: str | PathLike[str] | None = None) -> StateDict:
    """Average the weights of the checkpoints that match a pattern; see :func:`average_weights`.

    Args:
        path_mask: such as "logs/checkpoints/epoch_*.pth". If nothing matches "logs/*.pth", the folder
            ``logs/checkpoints``, in which runs save, is searched too. Of a URL, only the last part may be a pattern.
        logdir: of a run, or its URL, in whose checkpoints the pattern is searched.
    Raises:
        FileNotFoundError: nothing matches.
        ValueError: names differ, or a folder in a URL is a pattern.
    """
    mask = _local(path_mask) if logdir is None else readable(logdir) / "checkpoints" / path_mask
    paths = glob.glob(str(mask)) or glob.glob(str(mask.parent / "checkpoints" / mask.name))
    if not paths:
        raise FileNotFoundError(f"no checkpoint matches {shown(mask)!r}")
    return average_weights([read_weights(Path(each)) for each in sorted(paths)])


def _local(mask: str) -> Path:
    """Return the pattern of local files that one with a URL stands for; they are copied."""
    if (url := as_url(mask)) is None:
        return plain_path(mask)
    folder, _, name = url.rpartition("/")
    if glob.has_magic(folder):
        raise ValueError(f"only the last part of a URL may be a pattern, got {url}: pass logdir and a pattern")
    return readable(folder) / name


def _mean(values: Sequence[Tensor]) -> Tensor:
    if not values[0].is_floating_point():
        return values[-1]
    return torch.stack([each.double() for each in values]).mean(dim=0).to(values[0].dtype)
