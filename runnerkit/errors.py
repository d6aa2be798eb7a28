"""The error for an unknown name of a metric, a loader, a batch key or a component, and the name that was meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class UnknownKeyError(KeyError):
    """An unknown name; the message lists the existing ones.

    >>> print(UnknownKeyError("no metric 'acuracy'; choose from ['accuracy']"))  # a KeyError would print quotes
    no metric 'acuracy'; choose from ['accuracy']
    """

    def __str__(self) -> str:
        return " ".join(map(str, self.args))


def did_you_mean(given: object, known: Iterable[object]) -> str:
    """Return the end of a message that suggests a known name which resembles `given`; "" if none does.

    >>> did_you_mean("vaild", ["train", "valid"]), did_you_mean("x", ["train", "valid"])
    ("; did you mean 'valid'?", '')
    """
    nearest = nearest_name(given, known)
    return "" if nearest is None else f"; did you mean {nearest!r}?"


def nearest_name(given: object, known: Iterable[object]) -> str | None:
    """Return the known name that `given` resembles but for a few letters or their case; None without one."""
    if not isinstance(given, str):
        return None
    names = {each.lower(): each for each in known if isinstance(each, str)}
    found = get_close_matches(given.lower(), names, n=1, cutoff=0.7)
    return names[found[0]] if found else None


def check_component(reader: object, kind: str, key: str | None, known: Mapping[str, object]) -> None:
    """Raise unless the runner has the component that a callback reads; without a key, its only one.

    Args:
        kind: "model", "criterion", "optimizer" or "scheduler".
        known: the runner's components of that kind by key, a single one by "".
    Raises:
        KeyError: with what to pass.
    """
    name = reader if isinstance(reader, str) else type(reader).__name__
    if (key or "") in known:
        return
    if not known:
        raise UnknownKeyError(
            f"{name} needs {'an' if kind == 'optimizer' else 'a'} {kind}, and the runner has none: pass {kind}= to "
            f"train, or return it in get_{kind}"
        )
    if "" in known:
        raise UnknownKeyError(f"{name} needs {kind} {key!r}; the runner has one, without a key: leave {kind}_key out")
    if not key:
        raise UnknownKeyError(f"{name} needs one {kind}; the runner has {sorted(known)}: pass {kind}_key=, one of them")
    raise UnknownKeyError(f"{name} needs {kind} {key!r}; the runner has {sorted(known)}{did_you_mean(key, known)}")
