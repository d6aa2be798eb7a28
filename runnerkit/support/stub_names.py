"""Lazy names of a package, declared once in the stub file beside it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def names_of_stub(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` (PEP 562) of a module with a ``.pyi`` file.

    Type checkers read the stub; at run time a name is imported when it is first used. The stub holds absolute imports:
    ``from package.module import Name as Name``, and ``from package import *`` for another module with a stub. If it has
    an ``__all__``, names that this leaves out are found, but not listed.

    Args:
        module: the module's ``__name__``.

    >>> import runnerkit.dl
    >>> get, names, public = names_of_stub("runnerkit.dl")
    >>> get("CPUEngine")
    <class 'runnerkit.engines.device.CPUEngine'>
    """
    module_of = dict(imports_of_stub(module))
    listed = _listed_in_stub(module)
    own = {name for name, source in module_of.items() if source != f"{module}.{name}"}  # not submodules
    public = listed or sorted(own)

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {module!r} does not have the attribute {name!r}")
        source = import_module(module_of[name])
        if module_of[name] == f"{module}.{name}":
            value = source
        else:  # as `from package import name` does: a submodule need not have been imported
            value = getattr(source, name, None) or import_module(f"{module_of[name]}.{name}")
        setattr(sys.modules[module], name, value)  # the next lookup does not reach this function
        return value

    def names() -> list[str]:
        return sorted(listed or module_of)

    return get, names, public


def imports_of_stub(module: str) -> Iterator[tuple[str, str]]:
    """Yield (name, module to import it from) of a stub; for a submodule, the module is its own path."""
    tree = ast.parse(_stub_of(module).read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        for alias in node.names:
            if alias.name == "*":
                yield from imports_of_stub(node.module)
            elif node.module == module:
                yield alias.name, f"{module}.{alias.name}"
            elif alias.asname == alias.name:  # without an alias, the import serves the stub itself
                yield alias.name, node.module


def _listed_in_stub(module: str) -> list[str]:
    for node in ast.parse(_stub_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _stub_of(module: str) -> Path:
    spec = sys.modules[module].__spec__ if module in sys.modules else find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{module} is not installed")
    return Path(spec.origin).with_suffix(".pyi")
