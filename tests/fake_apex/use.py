"""Make the package beside this file, or none, be what `import apex` finds."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield the stand-in, importable here and, through PYTHONPATH, in processes that are started."""
    with no_apex(monkeypatch):
        monkeypatch.syspath_prepend(Path(__file__).parent)
        yield importlib.import_module("apex")


@contextmanager
def no_apex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide whatever package `apex` this environment has."""
    _forget()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path or ".") / "apex").is_dir()])
    importlib.invalidate_caches()
    yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
