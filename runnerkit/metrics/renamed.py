"""Names of metrics that have changed: results still have the old ones, with a warning that says what to write."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Container, KeysView
from typing import Any, SupportsIndex

from runnerkit.types import Metrics

_RENAMED = {"accuracy01": "accuracy"}  # also between a prefix and a suffix


def current_name(name: str, known: Container[str], *, stacklevel: int = 2) -> str:
    """Return today's name of a metric: another only if `known` has that and not `name`, with a warning.

    >>> current_name("loss", {"loss"}), current_name("accuracy03", {"accuracy"})
    ('loss', 'accuracy03')
    """
    new = name if name in known else _renamed(name, known)
    if new != name:
        warnings.warn(
            f"the metric {name!r} is now called {new!r} only: write {new!r}; the old name will be removed in 1.0.0",
            FutureWarning,
            stacklevel=stacklevel + 1,
        )
    return new


def _renamed(name: Any, known: Container[str]) -> Any:
    for old, new in _RENAMED.items():
        if isinstance(name, str) and old in name and name.replace(old, new) in known:
            return name.replace(old, new)
    return name


class NamedMetrics(Metrics):
    """A dict of metrics, in which a metric that was renamed is also found by its old name, with a warning.

    >>> metrics = NamedMetrics(accuracy=0.5)
    >>> "accuracy01" in metrics, [*metrics]
    (True, ['accuracy'])
    """

    def __missing__(self, name: str) -> float:
        new = current_name(name, super().keys(), stacklevel=3)
        if new == name:
            raise KeyError(name)
        return self[new]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or _renamed(name, super().keys()) != name

    def keys(self) -> Any:
        """Return the names of today, in which the old ones are found too: Catalyst's examples look there."""
        return KeysView(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if protocol != 2:
            return super().__reduce_ex__(protocol)
        # The protocol of torch.save, whose files torch.load(weights_only=True) must read: it knows this class.
        return OrderedDict, (), None, None, iter(self.items())

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default
