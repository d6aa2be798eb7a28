"""Imports as if only some of the installed packages were there; needs the standard library alone."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def normalized(name: str) -> str:
    """Return a distribution's name in its usual form: "scikit-learn" for "scikit_learn"."""
    return re.sub(r"[-_.]+", "-", name).lower()


class _Filtered:
    """A finder of modules that finds only some of those that another one finds."""

    def __init__(self, finder: Any, knows: Callable[[str], bool]) -> None:
        self.finder, self.knows = finder, knows

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return self.finder.find_spec(fullname, path, target) if self.knows(fullname.partition(".")[0]) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


class OnlyThese:
    """Imports of no other modules than those of the standard library, of runnerkit and of `packages`."""

    def __init__(self, packages: Iterable[str]) -> None:
        self.known = {*packages, *sys.stdlib_module_names, "runnerkit", "tests"}

    def install(self) -> None:
        """Hide the others, and their distributions, from this process, which must not have imported them."""
        modules = importlib.metadata.packages_distributions()
        sys.meta_path[:] = [_Filtered(each, self.knows) for each in sys.meta_path]
        shown = {normalized(name) for module, names in modules.items() if self.knows(module) for name in names}
        hidden = {normalized(name) for names in modules.values() for name in names} - shown
        importlib.metadata.Distribution.from_name = _from_name_without(hidden)  # type: ignore[method-assign]

    def knows(self, module: str) -> bool:
        """Return whether a top-level module may be imported."""
        return module in self.known or module.startswith("_")  # modules in C that belong to a package


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Hide a package and its distribution until the end of the test."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", _from_name_without({normalized(package)}))


def _from_name_without(names: set[str]) -> Any:
    original = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if normalized(name) in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    return staticmethod(from_name)
