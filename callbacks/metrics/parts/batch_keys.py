"""Selection of batch values by the keys passed to a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from runnerkit.errors import UnknownKeyError, did_you_mean

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

Keys: TypeAlias = str | list[str] | dict[str, str]


def pick(runner: IRunner, *keys: Keys, reader: str) -> tuple[list[Any], dict[str, Any]]:
    """Collect arguments from ``runner.batch``.

    A str gives a positional one, a list those of the same names, and a dict renames them.

    Raises:
        TypeError: the batch is not a dict.
        KeyError: a key is missing; the message lists the available keys.
    """
    batch = runner.batch
    arguments: list[Any] = []
    keyword_arguments: dict[str, Any] = {}
    try:
        for each in keys:
            if type(each) is str or isinstance(each, str):  # the first test avoids a call
                arguments += [batch[each]]
            elif type(each) is dict or (type(each) is not list and isinstance(each, Mapping)):
                keyword_arguments |= {name: batch[key] for key, name in each.items()}
            else:
                keyword_arguments |= {key: batch[key] for key in each}
    except KeyError as error:
        found = f"{reader} reads {error.args[0]!r} of a batch of loader {runner.loader_key!r}, which has {list(batch)}"
        raise UnknownKeyError(found + did_you_mean(error.args[0], batch)) from None
    except (TypeError, IndexError):
        if isinstance(batch, dict):
            raise
        raise TypeError(
            f"{reader} reads the batch by key, but it is a {type(batch).__name__}: make it a dict in handle_batch"
        ) from None
    return arguments, keyword_arguments
