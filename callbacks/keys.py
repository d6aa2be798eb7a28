"""What a callback reads of a batch, by the keys that the user gave it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

Keys: TypeAlias = str | list[str] | dict[str, str]


def pick(runner: IRunner, *keys: Keys, reader: str) -> tuple[list[Any], dict[str, Any]]:
    """Collect arguments from ``runner.batch``: a str or a list gives positional ones, a dict renames to keyword ones.

    Raises:
        TypeError: the batch is no dict.
        KeyError: a key is not in it; named with those that are.
    """
    batch = runner.batch
    if not isinstance(batch, dict):
        raise TypeError(
            f"{reader} reads the batch by key, but it is a {type(batch).__name__}: make it a dict in handle_batch"
        )
    arguments: list[Any] = []
    keyword_arguments: dict[str, Any] = {}
    for each in keys:
        for key in [each] if isinstance(each, str) else each:
            if key not in batch:
                raise KeyError(
                    f"{reader} reads {key!r} of a batch of loader {runner.loader_key!r}, which has {list(batch)}"
                )
            if isinstance(each, dict):
                keyword_arguments[each[key]] = batch[key]
            else:
                arguments.append(batch[key])
    return arguments, keyword_arguments
