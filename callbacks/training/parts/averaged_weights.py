"""An average of a module's weights, by ``torch.optim.swa_utils.AveragedModel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from runnerkit.types import StateDict

# (averages, weights, number of averaged weights): updates the averages in place.
AverageFn = Callable[[list[Tensor], list[Tensor], int], None]


class AveragedWeights:
    """The average of a module's weights during training.

    Args:
        module: its parameters must stay at the same place in memory.
        average: torch's ``get_ema_multi_avg_fn(decay)`` or ``get_swa_multi_avg_fn()``.
        use_buffers: whether to average buffers too; otherwise they equal the module's.
    """

    def __init__(self, module: nn.Module, *, average: AverageFn, use_buffers: bool) -> None:
        self.module = module
        self.num_averaged = 0
        self._average = average
        self._use_buffers = use_buffers
        self._averaged = AveragedModel(module, use_buffers=use_buffers)
        self._pairs = list(zip(self._tensors(self._averaged.module), self._tensors(module), strict=True))
        self._groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for mine, theirs in self._pairs:
            averages, weights = self._groups.setdefault((mine.device, mine.dtype), ([], []))
            averages.append(mine.detach())
            weights.append(theirs.detach())

    def _tensors(self, module: nn.Module) -> Iterator[Tensor]:
        return chain(module.parameters(), module.buffers() if self._use_buffers else ())

    def update(self) -> None:
        """Include the module's weights in the average; the first update copies them."""
        if not self.num_averaged:
            self._averaged.update_parameters(self.module)
        else:  # like update_parameters, which in each step also copies its counter to the device and synchronizes
            for averages, weights in self._groups.values():
                self._average(averages, weights, self.num_averaged)
        self.num_averaged += 1

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the average and the module's weights; a second call swaps them back."""
        for mine, theirs in self._pairs:
            weights = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(weights)

    @torch.no_grad()
    def weights(self) -> StateDict:
        """Return the average as the module's ``state_dict``; the next update changes its tensors in place."""
        if not self._use_buffers:
            for mine, theirs in zip(self._averaged.module.buffers(), self.module.buffers(), strict=True):
                mine.copy_(theirs)
        return self._averaged.module.state_dict()

    def state_dict(self) -> StateDict:
        """Return the state to resume from."""
        return {"num_averaged": self.num_averaged, "weights": self.weights() if self.num_averaged else {}}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.num_averaged = state["num_averaged"]
        if self.num_averaged:
            self._averaged.module.load_state_dict(state["weights"])
