"""Weights in ``.safetensors`` files, which hold only named tensors; requires the package safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from runnerkit.storage.atomic_file import AtomicFile
from runnerkit.types import StateDict

SUFFIX = ".safetensors"


def write_safetensors(weights: Mapping[str, Any], path: Path) -> list[str]:
    """Save tensors by name, atomically.

    If a tensor has several names (tied weights), the file holds the first, and the others in its metadata, like that
    of ``safetensors.torch.save_model``.

    Returns:
        The names of the tensors that the file holds.
    Raises:
        ValueError: a value is not a tensor.
        OSError: the folder or the file cannot be written.
        ImportError: the package is missing.
    """
    package = _package()
    others = sorted(name for name, value in weights.items() if not isinstance(value, Tensor))
    if others:
        raise ValueError(f"{SUFFIX} holds tensors only, and these are not: {', '.join(others)}")
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}
    ties: dict[str, str] = {}
    memory: set[int] = set()
    for name, tensor in weights.items():
        identity = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.numel() and identity in names:
            ties[name] = names[identity]
            continue
        names[identity] = name
        start = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if start in memory else tensor.contiguous()  # shared storage is refused
        memory.add(start)
    path.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFile(path) as temporary:
        try:
            package.torch.save_file(tensors, temporary, metadata={"format": "pt", **ties})
        except package.SafetensorError as error:  # not an OSError
            raise OSError(f"cannot write {path}: {error}") from error
    return list(tensors)


def read_safetensors(path: Path) -> StateDict:
    """Load tensors by name to the CPU; tied weights under each of their names.

    Raises:
        ValueError: the file is truncated, or has another format.
        ImportError: the package is missing.
    """
    package = _package()
    try:
        with package.safe_open(path, framework="pt") as file:
            ties = file.metadata() or {}
        tensors: StateDict = package.torch.load_file(path)
    except package.SafetensorError as error:
        raise ValueError(f"{path} is not a complete {SUFFIX} file: {error}") from error
    return tensors | {name: tensors[kept] for name, kept in ties.items() if kept in tensors and name not in tensors}


def _package() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            f"{SUFFIX} files need the package safetensors: pip install 'runnerkit[safetensors]'"
        ) from None
    return safetensors
