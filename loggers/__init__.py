"""Loggers: one class for each log format or tracking service."""

from __future__ import annotations

if __name__ != "runnerkit.loggers":
    raise ImportError("this folder is the package runnerkit.loggers: use `import runnerkit.loggers`")

from runnerkit.support.stub_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
