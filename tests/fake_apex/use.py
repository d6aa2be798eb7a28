"""Make `import apex` find the recording stand-in in this folder."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield the stand-in, importable here and in the processes that a test starts."""
    _forget()
    monkeypatch.syspath_prepend(Path(__file__).parent)
    yield importlib.import_module("apex")
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
