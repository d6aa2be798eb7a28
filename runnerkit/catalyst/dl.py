"""``runnerkit.dl`` with runners that also write Catalyst's files."""

from __future__ import annotations

from runnerkit.support.stub_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
