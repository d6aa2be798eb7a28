"""Pickles of lambdas and of what ``__main__`` defines too, which pickle alone cannot send to another process."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def dumps(value: Any) -> bytes:
    """Pickle by cloudpickle, as :func:`written_by` says."""

    def write(pickler: Any) -> bytes:
        file = io.BytesIO()
        pickler(file).dump(value)
        return file.getvalue()

    return written_by(write)


def written_by(write: Callable[[Any], T]) -> T:
    """Return `write(pickler)`: a class of cloudpickle's, which is imported by those who send something.

    Optimizers keep the attributes of their class, which ``torch.optim.Optimizer.__getstate__`` leaves out: the list of
    parameters of LBFGS, for example. If that fails, `write` is called again, with cloudpickle's own.
    """
    import cloudpickle
    from torch.optim import Optimizer

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Optimizer) and type(obj).__getstate__ is Optimizer.__getstate__:
                constructor, arguments, state = tuple[Any, ...](obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL))[:3]
                return constructor, arguments, {**_own_attributes(obj), **state}
            return super().reducer_override(obj)

    try:
        return write(Pickler)
    except OSError:  # of the disk
        raise
    except Exception as error:
        result = write(cloudpickle.Pickler)  # raises as well, unless such an attribute is to blame
        logger.warning("an optimizer leaves the attributes of its class behind, which cannot be sent: %s", error)
        return result


def loads(data: bytes) -> Any:
    """Take back what :func:`dumps` gave; trusted bytes only, as with any pickle."""
    return pickle.loads(data)


def _own_attributes(optimizer: Any) -> dict[str, Any]:
    """Return what the optimizer's class or the user set: neither torch's hooks nor a scheduler's patch of `step`."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("step", "_opt_called", "_zero_grad_profile_name") and not name.startswith("_optimizer_")
    }
