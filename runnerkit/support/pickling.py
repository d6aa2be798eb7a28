"""Pickling for other processes, including lambdas and names from ``__main__``, which plain pickle cannot send."""

from __future__ import annotations

import io
import logging
import marshal
import pickle
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, TypeVar

from runnerkit.support.torch_internals import is_set_by_torch

logger = logging.getLogger(__name__)

T = TypeVar("T")


def dumps(value: Any) -> bytes:
    """Pickle with cloudpickle; see :func:`written_by`."""

    def write(pickler: Any) -> bytes:
        file = io.BytesIO()
        pickler(file).dump(value)
        return file.getvalue()

    return written_by(write)


def written_by(write: Callable[[Any], T]) -> T:
    """Return `write(pickler)` for a class of cloudpickle, which is only imported here.

    Optimizers keep the attributes of their class, which ``torch.optim.Optimizer.__getstate__`` leaves out: the list of
    parameters of LBFGS, for example. If that fails, `write` is called again with cloudpickle's own pickler.
    """
    import cloudpickle
    from torch.optim import Optimizer

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Optimizer) and type(obj).__getstate__ is Optimizer.__getstate__:
                constructor, arguments, state = tuple[Any, ...](obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL))[:3]
                return constructor, arguments, {**_own_attributes(obj), **state}
            if isinstance(obj, CodeType):  # cloudpickle >= 3.1.3 drops the file name, which tracebacks need
                return marshal.loads, (marshal.dumps(obj),)
            if (
                isinstance(obj, type | FunctionType)
                and obj.__module__ == "__main__"
                and obj.__qualname__ in _known_in_main
            ):
                return _in_main, (obj.__qualname__,)
            return super().reducer_override(obj)

    try:
        return write(Pickler)
    except OSError:  # from the disk
        raise
    except Exception as error:
        result = write(cloudpickle.Pickler)  # raises as well, unless such an attribute is the cause
        logger.warning("attributes of an optimizer's class cannot be sent and are left out: %s", error)
        return result


_known_in_main: set[str] = set()


def refer_to_main(names: Iterable[str]) -> None:
    """Refer to these classes and functions of ``__main__`` by name in all pickles of this process from now on.

    For a process that got them from the one that its pickles go to, where cloudpickle would otherwise replace the
    methods of a class by copies with other globals.
    """
    _known_in_main.update(names)


def is_found_in_main(obj: Any) -> bool:
    """Return whether a class or function is found in ``__main__`` by its name."""
    try:
        return obj.__module__ == "__main__" and _in_main(obj.__qualname__) is obj
    except AttributeError:  # a local one, a lambda, or a script that something else executes
        return False


def _in_main(name: str) -> Any:
    return attrgetter(name)(sys.modules["__main__"])


def loads(data: bytes) -> Any:
    """Unpickle the result of :func:`dumps`; trusted bytes only, as with any pickle."""
    return pickle.loads(data)


def _own_attributes(optimizer: Any) -> dict[str, Any]:
    """Return attributes set by the optimizer's class or the user, without torch's hooks and a scheduler's `step`."""
    return {name: value for name, value in vars(optimizer).items() if not is_set_by_torch(name)}
