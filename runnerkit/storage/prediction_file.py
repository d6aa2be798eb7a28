"""Prediction files for any number of samples, written batch by batch: .parquet or .csv."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from runnerkit.storage.atomic_file import AtomicFile
from runnerkit.storage.rows import Path as Keys
from runnerkit.storage.rows import name_of, walk

Write: TypeAlias = Callable[[Any], None]

_ROW_GROUP_BYTES = 32 * 2**20
_AS_TENSORS = "torch.save(list(runner.predict_loader(...)), path)"  # keeps structures and types, and needs the memory


def check_path(path: Path) -> None:
    """Raise if predictions cannot be written to a file of this name.

    Raises:
        ValueError: unknown suffix.
        ImportError: .parquet without pyarrow.
    """
    if path.suffix not in _FORMATS:
        raise ValueError(
            f"predictions are written as {' or '.join(_FORMATS)}, got {str(path)!r}; for tensors use {_AS_TENSORS}"
        )
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ImportError("a .parquet file needs pyarrow: pip install 'runnerkit[parquet]'; or write .csv")


@contextmanager
def prediction_file(path: Path) -> Iterator[Write]:
    """Provide a function that appends a prediction's rows; the file exists, complete, if the body succeeds.

    Raises:
        ValueError: nothing was appended, or a prediction has a different form from the first one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    num_batches = 0
    with AtomicFile(path) as temporary, _FORMATS[path.suffix](temporary) as write:

        def write_rows(prediction: Any) -> None:
            nonlocal num_batches
            num_batches += 1
            write(prediction)

        yield write_rows
        if not num_batches:
            raise ValueError(f"no predictions to write to {path}: the loader gave no batch")


def columns_of(prediction: Any) -> dict[str, Any]:
    """Name a prediction's parts: keys and indices joined by dots; a single part is "prediction".

    >>> list(columns_of({"logits": torch.zeros(2), "boxes": [torch.zeros(2), torch.ones(2)], "mask": None}))
    ['logits', 'boxes.0', 'boxes.1']
    """
    columns: dict[str, Any] = {}
    for path, part in walk(prediction):
        name = ".".join(map(str, path)) or "prediction"
        if name in columns:
            raise ValueError(f"two parts of the prediction would be column {name!r}; rename one in predict_batch")
        if part is not None:
            columns[name] = _as_array(part, path)
    return columns


def _as_array(part: Any, path: Keys) -> Any:
    if isinstance(part, Tensor):
        part = (part.float() if part.dtype == torch.bfloat16 else part).numpy()  # NumPy lacks bfloat16
    if isinstance(part, np.ndarray) and part.dtype.kind not in "biuf":
        raise TypeError(f"{name_of(path)} is of type {part.dtype}, which tables do not support; use {_AS_TENSORS}")
    return part


@contextmanager
def _csv(path: Path) -> Iterator[Write]:
    header: list[str] = []
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)

        def write(prediction: Any) -> None:
            columns = {name: _as_text(column) for name, column in flat_columns(prediction).items()}
            if not header:
                header.extend(columns)
                rows.writerow(header)
            elif header != list(columns):
                raise ValueError(
                    f"columns {list(columns)} are not those of the first batch, {header}; pad vectors to one length in "
                    "predict_batch, or write a .parquet file"
                )
            rows.writerows(zip(*columns.values(), strict=True))

        yield write


def flat_columns(prediction: Any) -> dict[str, Any]:
    """Name a prediction's numbers like :func:`columns_of`; those of a vector are ``name_0``, ``name_1``, ...

    >>> list(flat_columns({"logits": torch.zeros(4, 2), "name": list("abcd")}))
    ['logits_0', 'logits_1', 'name']
    """
    flat: dict[str, Any] = {}
    for name, column in columns_of(prediction).items():
        parts = {name: column} if isinstance(column, list) else _scalar_columns(name, column)
        twice = sorted(parts.keys() & flat.keys())
        if twice:
            raise ValueError(
                f"two parts of the prediction would be column {twice[0]!r} of a .csv file or a frame, one of them an "
                f"element of {name!r} or of another vector; rename one in predict_batch, or write a .parquet file"
            )
        flat |= parts
    return flat


def _scalar_columns(name: str, column: Any) -> dict[str, Any]:
    return {"_".join([name, *map(str, index)]): column[(slice(None), *index)] for index in np.ndindex(column.shape[1:])}


def _as_text(column: Any) -> Any:
    # As text, a number has the fewest digits that distinguish it from its neighbors of the same type.
    return column if isinstance(column, list) else column.astype(str)


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    import pyarrow
    from pyarrow import parquet

    waiting: list[Any] = []
    with ExitStack() as stack:
        writer: Any = None
        size_bytes = 0

        def flush() -> None:
            nonlocal size_bytes
            if waiting:
                writer.write_table(pyarrow.concat_tables(waiting))
                waiting.clear()
                size_bytes = 0

        def write(prediction: Any) -> None:
            nonlocal writer, size_bytes
            table = pyarrow.table({name: _arrow(column) for name, column in columns_of(prediction).items()})
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(path, table.schema))
            elif table.schema != writer.schema:
                found, first = (
                    {each.name: str(each.type) for each in schema} for schema in (table.schema, writer.schema)
                )
                raise ValueError(
                    f"columns {found} are not those of the first batch, {first}; return predictions of the same form"
                )
            waiting.append(table)
            # Readers work on row groups: one for each batch would be too many.
            size_bytes += table.nbytes
            if size_bytes >= _ROW_GROUP_BYTES:
                flush()

        yield write
        flush()


def _arrow(column: Any) -> Any:
    import pyarrow

    if isinstance(column, list) or column.ndim == 1:
        return pyarrow.array(column)
    num_rows, length = column.shape[:2]
    items = _arrow(column.reshape(num_rows * length, *column.shape[2:]))
    return pyarrow.ListArray.from_arrays(np.arange(num_rows + 1, dtype=np.int32) * np.int32(length), items)


_FORMATS = {".parquet": _parquet, ".csv": _csv}
