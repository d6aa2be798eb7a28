"""The error for an unknown name of a metric, a loader or a batch key, and the suggestion of the name that was meant."""

from __future__ import annotations

from collections.abc import Iterable
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


def component_missing(reader: str, kind: str, key: str | None, components: Iterable[str]) -> UnknownKeyError:
    """Return the error for a callback that needs a component which the runner does not have.

    >>> print(component_missing("OptimizerCallback", "optimizer", None, []))
    OptimizerCallback needs optimizer; the runner has none: pass optimizer=, or return it from get_optimizer
    >>> print(component_missing("CriterionCallback", "criterion", None, ["a", "b"]))
    CriterionCallback needs criterion_key=, one of ['a', 'b']
    """
    have = sorted(components)
    if key is None and have:
        return UnknownKeyError(f"{reader} needs {kind}_key=, one of {have}")
    needs = f"{reader} needs {kind}" + (f" {key!r}" if key is not None else "")
    ways = "" if have else f": pass {kind}=, or return it from get_{kind}"
    return UnknownKeyError(f"{needs}; the runner has {have or 'none'}{ways}")


def nearest_name(given: object, known: Iterable[object]) -> str | None:
    """Return the known name that `given` resembles but for a few letters or their case; None without one."""
    if not isinstance(given, str):
        return None
    names = {each.lower(): each for each in known if isinstance(each, str)}
    found = get_close_matches(given.lower(), names, n=1, cutoff=0.7)
    return names[found[0]] if found else None
