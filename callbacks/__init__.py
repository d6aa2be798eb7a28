"""Callbacks: actions around experiments, stages, epochs, loaders and batches, one file each."""

from __future__ import annotations

if __name__ != "runnerkit.callbacks":
    raise ImportError("this folder is the package runnerkit.callbacks: write `import runnerkit.callbacks`")

from runnerkit.support.stub_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
