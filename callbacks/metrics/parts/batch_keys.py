"""Selection of batch values by the keys passed to a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from runnerkit.errors import UnknownKeyError, did_you_mean

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

Keys: TypeAlias = str | list[str] | dict[str, str]
OF_RUNNER = {  # names of arguments that may be left out, and the runner's attribute
    "input_key": "output_key", "embeddings_key": "output_key", "target_key": "target_key", "labels_key": "target_key"
}  # fmt: skip


def keys_of(owner: object, runner: IRunner, given: Mapping[str, Keys | None]) -> tuple[Keys, ...]:
    """Return the batch keys of a callback, in order; None is the key of its SupervisedRunner.

    Args:
        owner: the callback, whose class errors name.
        given: the keys by the names of their arguments.
    Raises:
        TypeError: it is another runner, or one with several outputs or targets; the message says what to write.
    """
    return tuple(_key_of_runner(owner, runner, name) if key is None else key for name, key in given.items())


def _key_of_runner(owner: object, runner: IRunner, name: str) -> str:
    its_name = OF_RUNNER[name]
    its_key = getattr(runner, its_name, None)
    if its_key is None:
        raise TypeError(
            f"{type(owner).__name__}: pass {name}=, a key of the batch, since {type(runner).__name__} is not a "
            f"SupervisedRunner, whose {its_name} would be the default"
        )
    is_renamed = its_name == "output_key" and isinstance(its_key, Mapping)
    names = [its_key] if isinstance(its_key, str) else [*(its_key.values() if is_renamed else its_key)]
    if len(names) != 1:
        raise TypeError(f"{type(owner).__name__}: pass {name}=, since the runner's {its_name} has several: {names}")
    return str(names[0])


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
