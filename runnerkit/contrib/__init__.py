"""Data sets, transforms, layers and an optimizer, used by the examples; the core does not import this package."""

from __future__ import annotations

from runnerkit.support.stub_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
