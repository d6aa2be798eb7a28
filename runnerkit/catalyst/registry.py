"""Catalyst's registry of classes by name. Programs may add to it; ``runnerkit run`` imports classes by their paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["REGISTRY", "Registry"]

Factory = TypeVar("Factory", bound=Callable[..., Any])


class _Registry:
    """Classes and functions by name.

    >>> @Registry
    ... def make():
    ...     return 1
    >>> REGISTRY.get("make") is make
    True
    """

    def __init__(self) -> None:
        self._factories: dict[str, Callable[..., Any]] = {}

    def add(self, factory: Factory) -> Factory:
        """Add by ``__name__``, and return what was added: a decorator."""
        self._factories[factory.__name__] = factory
        return factory

    def get(self, name: str) -> Callable[..., Any]:
        """Return what was added under `name`.

        Raises:
            KeyError: nothing was.
        """
        return self._factories[name]


REGISTRY = _Registry()
Registry = REGISTRY.add
