"""The error for a name that nothing has: a metric, a loader, a key of a batch."""

from __future__ import annotations


class UnknownKeyError(KeyError):
    """A name is misspelt, or its owner is missing; the message has the names that there are.

    >>> print(UnknownKeyError("no metric 'acuracy'; choose from ['accuracy']"))  # a KeyError shows it in quotes
    no metric 'acuracy'; choose from ['accuracy']
    """

    def __str__(self) -> str:
        return " ".join(map(str, self.args))
