"""Metrics as objects and functions, without a runner; exact on any number of processes."""

from __future__ import annotations

from runnerkit.support.stub_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
