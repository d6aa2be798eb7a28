"""Predictions as rows, one per sample: copied to the CPU and restored to the order of the data set.

A prediction is a tensor whose first dimension is the batch, or dicts, lists and tuples of such tensors. It may also
hold NumPy arrays, lists of plain values (one per row: names, labels) and None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from runnerkit.support.plain_values import of_same_type

Path: TypeAlias = tuple[Any, ...]  # keys and indices that lead to a part

_PLAIN = (str, bytes, bool, int, float, type(None))


def to_cpu_rows(prediction: Any, batch: Any, *, num_samples: int | None = None) -> Any:
    """Copy a batch's prediction to the CPU, without the rest of a view's storage, and check that it consists of rows.

    Args:
        batch: the model's input; its lengths are the possible numbers of rows if `num_samples` is None.
        num_samples: of the batch, if known.
    Raises:
        ValueError, TypeError: a part does not have a row per sample of the batch; it is named by its path.
    """
    lengths = set(_lengths(batch)) if num_samples is None else {num_samples}
    taken = map_parts(lambda parts, path: _to_cpu_rows(parts[0], path, lengths), [prediction])
    num_rows = {name_of(path): len(part) for path, part in walk(taken) if part is not None}
    if len(set(num_rows.values())) != 1:
        raise ValueError(f"{_rows_needed(())}; there are {num_rows or 'none'}")
    return taken


def interleave(predictions: Sequence[Any]) -> Any:
    """Interleave rows: the first row of each of `predictions`, then the second ones, and so on.

    Raises:
        ValueError: they do not fit together; the part is named by its path.
    """
    return map_parts(_interleave, predictions)


def walk(prediction: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the parts of a prediction with their paths of keys.

    >>> [path for path, _ in walk({"a": [torch.zeros(2)], "b": ["x", "y"]})]
    [('a', 0), ('b',)]
    """
    found: list[tuple[Path, Any]] = []
    map_parts(lambda parts, path: found.append((path, parts[0])), [prediction])
    yield from found


def map_parts(fn: Callable[[list[Any], Path], Any], predictions: Sequence[Any], path: Path = ()) -> Any:
    """Call `fn` with each part of several predictions of the same form, and its path; return results in that form.

    Raises:
        ValueError: they differ in form.
    """
    first = predictions[0]
    if not isinstance(first, dict | list | tuple) or _is_column(first):
        return fn(list(predictions), path)
    _check_form([_form(each) for each in predictions], path)
    keys = list(first) if isinstance(first, dict) else range(len(first))
    parts = {key: map_parts(fn, [each[key] for each in predictions], (*path, key)) for key in keys}
    if isinstance(first, dict):
        return parts
    return of_same_type(first, parts.values())


def name_of(path: Path) -> str:
    """Return a path as text.

    >>> name_of(("a", 0)), name_of(())
    ("prediction['a'][0]", 'prediction')
    """
    return "prediction" + "".join(f"[{key!r}]" for key in path)


def _form(value: Any) -> Any:
    if isinstance(value, dict):
        return set(value)
    return len(value) if isinstance(value, list | tuple) and not _is_column(value) else type(value).__name__


def _is_column(values: Any) -> bool:
    return isinstance(values, list | tuple) and len(values) > 0 and all(isinstance(value, _PLAIN) for value in values)


def _check_form(forms: list[Any], path: Path) -> None:
    if any(form != forms[0] for form in forms):
        raise ValueError(f"{name_of(path)} has different forms: {forms}; return the same form from predict_batch")


def _to_cpu_rows(part: Any, path: Path, lengths: set[int]) -> Any:
    if part is None:
        return None
    if isinstance(part, list | tuple):
        part = list(part)
    elif isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_nested:
            raise TypeError(f"{name_of(path)} is a {part.layout} tensor; make it dense in predict_batch")
        part = part.detach().cpu()
        if part.untyped_storage().nbytes() > part.nbytes:  # a view: its whole storage would be sent
            part = part.clone(memory_format=torch.contiguous_format)
    elif not isinstance(part, np.ndarray):
        raise TypeError(
            f"{name_of(path)} is a {type(part).__module__}.{type(part).__qualname__}; return tensors from "
            "predict_batch, or dicts, lists and tuples of tensors"
        )
    shape = (len(part),) if isinstance(part, list) else tuple(part.shape)
    if not shape or (lengths and shape[0] not in lengths):
        raise ValueError(f"{_rows_needed(path)}; its shape is {shape}, the batch has {_either(lengths)} samples")
    return part


def _rows_needed(path: Path) -> str:
    return (
        f"{name_of(path)} must have a row for each sample of the batch, so that it can be put in the order of the data "
        "set: keep the batch as the first dimension in predict_batch (a value for the whole batch: "
        "value.expand(batch_size)), or use predict_loader in one process"
    )


def _either(lengths: set[int]) -> str:
    return " or ".join(map(str, sorted(lengths))) or "an unknown number of"


def _lengths(value: Any) -> Iterator[int]:
    """Yield the lengths in a batch, one of which is its number of samples; nothing if they are unknown.

    A list that holds tensors or arrays is a structure such as (features, targets), so its own length is skipped.
    """
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield len(value)
    elif isinstance(value, dict | list | tuple):
        if not isinstance(value, dict) and not any(isinstance(each, Tensor | np.ndarray) for each in value):
            yield len(value)
        for each in value.values() if isinstance(value, dict) else value:
            yield from _lengths(each)


def _interleave(parts: list[Any], path: Path) -> Any:
    first = parts[0]
    _check_form([type(part).__name__ for part in parts], path)
    if first is None:
        return None
    total = sum(map(len, parts))
    rows: Any
    if isinstance(first, list):
        rows = [None] * total
    else:
        kinds = [(tuple(part.shape[1:]), part.dtype) for part in parts]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                f"{name_of(path)} differs in shape or type between processes: {[tuple(part.shape) for part in parts]}, "
                f"{[str(part.dtype) for part in parts]}; pad rows to one length in predict_batch"
            )
        shape = (total, *first.shape[1:])
        rows = first.new_empty(shape) if isinstance(first, Tensor) else np.empty(shape, first.dtype)
    shares = [range(total)[rank :: len(parts)] for rank in range(len(parts))]
    if any(len(share) != len(part) for share, part in zip(shares, parts, strict=True)):
        raise ValueError(f"{_rows_needed(path)}; the processes had {[len(part) for part in parts]} rows")
    for rank, part in enumerate(parts):
        rows[rank :: len(parts)] = part
    return rows
