"""You write what happens to a batch; runnerkit runs it on any engine, with exact results and minimal overhead."""

from __future__ import annotations

from runnerkit.support.stub_names import names_of_stub
from runnerkit.version import __version__ as __version__

# Lazy, so that shell completion and the help of the command line do not import torch.
__getattr__, __dir__, __all__ = names_of_stub(__name__)
