"""Attributes of a callback that its checkpoint store holds."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class StoreAttribute(Generic[T]):
    """An attribute of CheckpointCallback that its store alone holds, under the same name unless one is given."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, callback: Any, owner: type) -> T:
        if callback is None:
            raise AttributeError(f"{owner.__name__}.{self._name} is an attribute of instances")
        return vars(callback._store)[self._name or ""]  # type: ignore[no-any-return]

    def __set__(self, callback: Any, value: T) -> None:
        vars(callback._store)[self._name or ""] = value
