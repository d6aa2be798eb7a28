"""The error for an unknown name of a metric, a loader or a batch key."""

from __future__ import annotations


class UnknownKeyError(KeyError):
    """An unknown name; the message lists the existing ones.

    >>> print(UnknownKeyError("no metric 'acuracy'; choose from ['accuracy']"))  # a KeyError would print quotes
    no metric 'acuracy'; choose from ['accuracy']
    """

    def __str__(self) -> str:
        return " ".join(map(str, self.args))
