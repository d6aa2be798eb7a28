"""torch.nn, and the layers, losses and models of this package, in one namespace."""

from __future__ import annotations

from torch.nn import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from runnerkit.contrib.layers import *  # type: ignore[assignment]  # noqa: F403  # Flatten is in both
from runnerkit.contrib.losses import *  # noqa: F403
from runnerkit.contrib.models import *  # noqa: F403
