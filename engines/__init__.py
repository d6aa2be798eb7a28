"""Engines: one class per kind of parallelism, each of which holds a precision."""

from __future__ import annotations

if __name__ != "runnerkit.engines":
    raise ImportError("this folder is the package runnerkit.engines: write `import runnerkit.engines`")

from runnerkit.support.stub_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
