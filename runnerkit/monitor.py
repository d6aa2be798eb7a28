"""Monitors: the metric of a loader that selects, and which of its values are better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Self, TypeVar, cast

from runnerkit.errors import did_you_mean
from runnerkit.support.arguments import check_flags, check_strings
from runnerkit.support.deprecation import refuse_both, written

Mode = Literal["min", "max"]
_LOADERS = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "eval": "valid", "test": "test"}
_MINIMIZES: dict[str | None, bool | None] = {"min": True, "max": False, None: None}
T = TypeVar("T")


@dataclass(frozen=True)
class Monitor:
    """A metric of a loader, and whether smaller values of it are better; None if that is not known.

    >>> Monitor.of("train", "valid/accuracy", "max")
    Monitor(loader='valid', metric='accuracy', minimize=False)
    """

    loader: str
    metric: str
    minimize: bool | None = None

    @classmethod
    def of(cls, owner: str, monitor: Any, mode: Any) -> Self:
        """Read the arguments `monitor`, such as "valid/accuracy", and `mode` of `owner`, which errors name.

        Raises:
            TypeError, ValueError: `monitor` is not "loader/metric", or `mode` is neither "min" nor "max".
        """
        if isinstance(monitor, cls):  # of the names before 0.2.0
            return monitor
        check_strings(owner, monitor=monitor)
        loader, _, metric = monitor.partition("/")
        if not loader or not metric:
            meant = likely_monitor(monitor)
            raise ValueError(f"{owner}: monitor must be 'loader/metric', got {monitor!r}; write monitor={meant!r}")
        return cls(loader, metric, minimizes(owner, mode))

    @classmethod
    def if_given(cls, owner: str, monitor: Any, mode: Any) -> Self | None:
        """Read the arguments as :meth:`of` does; None if there is no monitor.

        Raises:
            ValueError: there is only a `mode`.
        """
        if monitor is not None:
            return cls.of(owner, monitor, mode)
        if minimizes(owner, mode) is not None:
            raise ValueError(f"{owner}: mode={mode!r} needs a metric: write for example monitor='valid/accuracy'")
        return None

    @property
    def name(self) -> str:
        """The monitor as users write it, such as "valid/accuracy"."""
        return f"{self.loader}/{self.metric}"

    @property
    def pair(self) -> tuple[str, str]:
        """The keys of the loader and of the metric."""
        return self.loader, self.metric

    def __str__(self) -> str:
        return f"{self.metric!r} of loader {self.loader!r} ({'smaller' if self.minimize else 'larger'} is better)"

    def directed(self, owner: str) -> Self:
        """Return it with a direction, that of a loss if none is given.

        Raises:
            ValueError: no direction is given for another metric.
        """
        if self.minimize is not None:
            return self
        if self.metric.rpartition("/")[2] == "loss":
            return replace(self, minimize=True)
        raise ValueError(
            f"{owner}: monitor={self.name!r} needs a mode: write mode='min' if smaller values are better, "
            "else mode='max'"
        )

    def among(self, loaders: Iterable[str]) -> Self:
        """Return it with the longest of the loaders that it begins with, as a key may contain "/"."""
        known = [key for key in loaders if self.name.startswith(f"{key}/") and self.name != f"{key}/"]
        if not known or not self.loader:
            return self
        loader = max(known, key=len)
        return replace(self, loader=loader, metric=self.name[len(loader) + 1 :])


def likely_monitor(name: str) -> str:
    """Return the monitor that is probably meant by a name, such as those of Keras and Lightning.

    >>> likely_monitor("val_loss"), likely_monitor("f1_macro"), likely_monitor("test")
    ('valid/loss', 'valid/f1_macro', 'test/loss')
    """
    loader, _, metric = re.sub("[_/]", "/", name.strip("/"), count=1).partition("/")
    if loader not in _LOADERS:
        return f"valid/{name.strip('/') or 'accuracy'}"
    return f"{_LOADERS[loader]}/{metric or 'loss'}"


def minimizes(owner: str, mode: Any) -> bool | None:
    """Return whether smaller values are better according to `mode`; None without one.

    Raises:
        ValueError: it is neither "min" nor "max".
    """
    if mode is not None and (not isinstance(mode, str) or mode not in _MINIMIZES):
        hint = did_you_mean(mode, ("min", "max"))
        raise ValueError(f"{owner}: mode must be 'min' (smaller values are better) or 'max', got {mode!r}{hint}")
    return _MINIMIZES[mode]


class MonitorPart(Generic[T]):
    """A part of a callback's `monitor`, as an attribute with the name that it had before 0.2.0."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __get__(self, callback: Any, owner: type) -> T:
        monitor = getattr(callback, "monitor", None)
        return cast("T", None if monitor is None else getattr(monitor, self._part))


@dataclass(frozen=True)
class ThreeArguments:
    """The arguments that `monitor` and `mode` replace since 0.2.0.

    Args:
        loader, metric, minimize: their names; the last may be None.
        defaults: (loader, metric) if only one of them is given; None if both must be.
        minimize_default: the direction if none is given.
    """

    loader: str = "loader_key"
    metric: str = "metric_key"
    minimize: str | None = "minimize"
    defaults: tuple[str, str] | None = None
    minimize_default: bool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.loader, self.metric, self.minimize)))

    def replace(self, owner: str, given: dict[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Replace them in the arguments of a call; return those that were given, and what to write instead of them.

        Raises:
            TypeError, ValueError: one of them is invalid, or `monitor` or `mode` is given as well.
        """
        old = {name: value for name in self.names if (value := given.pop(name, None)) is not None}
        if not old:
            return {}, {}
        refuse_both(owner, old, given, ("monitor", "mode"))
        monitor = self._monitor(owner, old)
        if monitor is None:
            return old, {}  # it does nothing without a metric
        mode = {True: "min", False: "max", None: None}[monitor.minimize]
        given["monitor"] = monitor
        name = monitor.name if monitor.loader else f"valid/{monitor.metric}"
        return old, {"monitor": name} | ({"mode": mode} if mode else {})

    def _monitor(self, owner: str, old: Mapping[str, Any]) -> Monitor | None:
        loader, metric = old.get(self.loader), old.get(self.metric)
        check_strings(owner, or_none=True, **{self.loader: loader, self.metric: metric})
        minimize = old.get(self.minimize or "", self.minimize_default)
        if minimize is not None:
            check_flags(owner, **{self.minimize or "": minimize})
            minimize = bool(minimize)
        if loader is None and metric is None:
            return None
        if loader is not None and "/" in loader and metric in _MINIMIZES:  # today's arguments, by position
            today = {"monitor": loader} | ({"mode": metric} if metric is not None else {})
            raise TypeError(f"{owner}: pass {' and '.join(today)} by name: write {written(today)}")
        if loader is None or metric is None:
            if self.defaults is None:
                found = f"{owner}: pass both {self.loader} and {self.metric}, or neither; got {written(old)}"
                raise ValueError(f"{found}; write for example monitor='{loader or 'valid'}/{metric or 'loss'}'")
            loader, metric = loader or self.defaults[0], metric or self.defaults[1]
            minimize = True if minimize is None and metric == "loss" else minimize
        return Monitor(loader, metric, minimize)
