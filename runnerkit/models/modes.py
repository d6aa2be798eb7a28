"""Training and evaluation modes of modules."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Modes:
    """The mode of each module and its children at one moment.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout())
    >>> model[1] = model[1].eval()
    >>> modes = Modes([model])
    >>> model = model.eval()
    >>> modes.restore()
    >>> [each.training for each in model.modules()]
    [True, True, False]
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        children = dict.fromkeys(child for module in modules for child in module.modules())
        self._training = {child: child.training for child in children}

    def restore(self) -> None:
        """Give each module the mode that it had."""
        for module, training in self._training.items():
            module.training = training
