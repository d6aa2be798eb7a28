"""Names of a package that are imported when somebody asks for them: ``import runnerkit`` pays for none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(
    package: str, modules: Mapping[str, tuple[str, ...]], *, packages: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's ``__getattr__`` and ``__dir__`` (PEP 562).

    Args:
        modules: names by the module within the package that has them.
        packages: modules within the package that are names themselves.

    >>> get, names = late_names("json", {"decoder": ("JSONDecoder",)})
    >>> get("JSONDecoder")
    <class 'json.decoder.JSONDecoder'>
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in packages:
            return import_module(f"{package}.{name}")  # which makes it an attribute
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    def names() -> list[str]:
        return sorted({*sys.modules[package].__all__, *packages})

    return get, names


def names_of(module: str, *packages: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a module that has the names of other packages: late ones come late.

    >>> import json
    >>> get, names = names_of("json", "json")
    >>> get("JSONDecoder")
    <class 'json.decoder.JSONDecoder'>
    """

    def get(name: str) -> Any:
        for package in packages:
            if name in sys.modules[package].__all__:
                value = getattr(sys.modules[package], name)
                setattr(sys.modules[module], name, value)  # asked for once
                return value
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted(sys.modules[module].__all__)

    return get, names
