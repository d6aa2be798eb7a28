"""Pickles of lambdas and of what ``__main__`` defines too, which pickle alone cannot send to another process."""

from __future__ import annotations

import pickle
from typing import Any


def dumps(value: Any) -> bytes:
    """Pickle by cloudpickle, which is imported by those who send something."""
    import cloudpickle

    return cloudpickle.dumps(value)  # type: ignore[no-any-return]


def loads(data: bytes) -> Any:
    """Take back what :func:`dumps` gave; trusted bytes only, as with any pickle."""
    return pickle.loads(data)
