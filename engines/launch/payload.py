"""Pickling of a function and all it refers to into files for other processes, which map large buffers into memory."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import UntypedStorage
from torch.storage import TypedStorage

from runnerkit.support import pickling
from runnerkit.support.function_members import FunctionMembers
from runnerkit.support.plain_values import attributes_of
from runnerkit.support.torch_internals import untyped

_LARGE = 1 << 20  # size in bytes from which a tensor or array is mapped


def pack(value: Any, path: Path, *, fills_main: bool = False) -> None:
    """Pickle `value` to `path`, including classes and functions of ``__main__`` and lambdas; large buffers beside it.

    torch.multiprocessing does not work here: it puts a CPU model's parameters in shared memory, so that all processes
    would update the same weights.

    Args:
        fills_main: let the ``__main__`` of the process that unpickles this hold the globals of the functions of this
            ``__main__``; torch.compile looks for them there.
    Raises:
        TypeError: something in it cannot be pickled; the message names its path of attributes.
    """
    try:
        pickling.written_by(partial(_write, value, path, fills_main))
    except OSError:
        raise
    except Exception as error:
        where, culprit = _unpicklable_part(value, path="runner", seen=set()) or ("runner", value)
        raise TypeError(
            f"{where} is a {type(culprit).__qualname__} and cannot be sent to the processes that train ({error}); "
            "create it where it is used: in get_loaders, get_model or another hook, which run there"
        ) from error


def unpack(path: Path) -> Any:
    """Load what :func:`pack` wrote; processes share its large buffers, except for pages that they write to."""
    places = json.loads(path.with_suffix(".places").read_text())["places"]
    buffers = []
    if places:
        with path.with_suffix(".buffers").open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        for begin, size, is_readonly in places:
            view = mapped[begin : begin + size]
            buffers.append(view.toreadonly() if is_readonly else view)
    with path.open("rb") as file:
        return pickle.load(file, buffers=buffers)


def names_in_main(path: Path) -> list[str]:
    """Return the names of the classes and functions in it that the ``__main__`` of its writer has."""
    names: list[str] = json.loads(path.with_suffix(".places").read_text())["main"]
    return names


def remove_files(path: Path) -> None:
    """Delete the files of :func:`pack`; values that are already unpacked stay valid."""
    for each in (path, path.with_suffix(".buffers"), path.with_suffix(".places")):
        each.unlink(missing_ok=True)


class _MainGlobals:
    """The names of ``__main__`` in the process that unpickles this."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _main_globals, ()


def _main_globals() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _write(value: Any, path: Path, fills_main: bool, base: Any) -> None:
    places: list[tuple[int, int, bool]] = []
    in_main: set[str] = set()
    with path.open("wb") as file, path.with_suffix(".buffers").open("wb") as buffers:

        def is_within(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < _LARGE:
                return True
            buffers.seek(-buffers.tell() % mmap.PAGESIZE, os.SEEK_CUR)
            places.append((buffers.tell(), view.nbytes, view.readonly))
            buffers.write(view)
            return False

        storages: dict[int, UntypedStorage] = {}  # by address: tensors that share memory still share it after unpacking

        class Pickler(base):  # type: ignore[misc]  # untyped
            def reducer_override(self, obj: Any) -> Any:
                if isinstance(obj, TypedStorage) and _is_large(whole := untyped(obj)):
                    return _typed, (storages.setdefault(whole.data_ptr(), whole), obj.dtype)
                if isinstance(obj, UntypedStorage) and _is_large(obj):
                    array = torch.empty(0, dtype=torch.uint8).set_(obj).numpy()
                    return _untyped, (pickle.PickleBuffer(array),)  # type: ignore[arg-type]  # it is a buffer
                if isinstance(obj, type | FunctionType) and pickling.is_found_in_main(obj):
                    in_main.add(obj.__qualname__)
                return super().reducer_override(obj)

        pickler = Pickler(file, protocol=5, buffer_callback=is_within)
        if fills_main:  # cloudpickle's table of the globals that functions share, by the id of the original ones
            pickler.globals_ref[id(_main_globals())] = _MainGlobals()
        pickler.dump(value)
    path.with_suffix(".places").write_text(json.dumps({"places": places, "main": sorted(in_main)}))


def _is_large(storage: UntypedStorage) -> bool:
    return storage.device.type == "cpu" and storage.nbytes() >= _LARGE


def _untyped(buffer: memoryview) -> UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed(untyped: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _unpicklable_part(value: Any, *, path: str, seen: set[int]) -> tuple[str, Any] | None:
    """Find the innermost part that does not pickle, with its path; None if it is only reachable by another path.

    Args:
        seen: ids of the objects visited so far, as references may form cycles.
    """
    refused = [(name, part) for name, part in _parts(value) if _is_refused(part)]
    seen.add(id(value))
    for name, part in refused:
        if id(part) not in seen and (found := _unpicklable_part(part, path=path + name, seen=seen)):
            return found
    return None if refused else (path, value)


def _is_refused(value: Any) -> bool:
    try:
        pickling.dumps(value)
    except Exception:  # a pickling failure may raise anything
        return True
    return False


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, partial):
        yield from (("", item) for item in value.args)
        yield from ((f" -> {name}", item) for name, item in value.keywords.items())
    elif callable(value):
        yield from _callable_parts(value)
    else:
        yield from ((f".{name}", item) for name, item in attributes_of(value).items())


def _callable_parts(function: Any) -> Iterator[tuple[str, Any]]:
    its = FunctionMembers(function)
    if its.owner is not None:
        yield "", its.owner
    code = its.code
    if code is not None:
        cells = zip(code.co_freevars, its.closure or (), strict=True)
        yield from ((f" -> {name}", cell.cell_contents) for name, cell in cells)
        used = set(code.co_names) & set(function.__globals__)
        yield from ((f" -> {name}", function.__globals__[name]) for name in sorted(used))
    yield from ((f".{name}", item) for name, item in attributes_of(function).items())
