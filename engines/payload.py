"""A function and all it refers to, as bytes for another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from runnerkit import pickling


def pack(value: Any) -> bytes:
    """Pickle `value`, classes and functions of ``__main__`` and lambdas included.

    Bytes, not torch.multiprocessing: that would put a CPU model's parameters in shared memory, and all processes would
    step on the same weights.

    Raises:
        TypeError: something in it cannot travel, named by its path of attributes.
    """
    try:
        return pickling.dumps(value)
    except Exception as error:
        path, culprit = _culprit(value, path="runner")
        raise TypeError(
            f"{path} is a {type(culprit).__qualname__} and cannot be sent to the processes that train ({error}); "
            "make it where it is used: in get_loaders, get_model or another hook, which run there"
        ) from error


def unpack(data: bytes) -> Any:
    """Take back what :func:`pack` gave."""
    return pickling.loads(data)


def _culprit(value: Any, *, path: str, depth: int = 0) -> tuple[str, Any]:
    """Follow what does not pickle down to the part that is to blame."""
    if depth < 20:
        for name, part in _parts(value):
            try:
                pickling.dumps(part)
            except Exception:  # whatever this part raises: that it does is what is looked for
                return _culprit(part, path=path + name, depth=depth + 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, partial):
        yield from (("", item) for item in value.args)
        yield from ((f" -> {name}", item) for name, item in value.keywords.items())
    elif isinstance(getattr(value, "__self__", None), object) and isinstance(value, Callable):  # type: ignore[arg-type]
        yield from _callable_parts(value)
    else:
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _callable_parts(function: Any) -> Iterator[tuple[str, Any]]:
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield "", owner
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    if code is not None:
        yield from ((f" -> {name}", cell.cell_contents) for name, cell in zip(code.co_freevars, cells, strict=True))
        used = set(code.co_names) & set(function.__globals__)
        yield from ((f" -> {name}", function.__globals__[name]) for name in sorted(used))
    yield from ((f".{name}", item) for name, item in getattr(function, "__dict__", {}).items())
