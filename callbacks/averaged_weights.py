"""A module, and beside it an average of its weights: ``torch.optim.swa_utils.AveragedModel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from runnerkit.types import StateDict

# (averages, weights, how many are averaged): changes the averages in place.
AverageFn = Callable[[list[Tensor], list[Tensor], int], None]


class AveragedWeights:
    """The average of a module's weights over the steps of its training.

    Args:
        module: whose parameters keep their place in memory.
        average: one of torch's ``get_ema_multi_avg_fn(decay)``, ``get_swa_multi_avg_fn()``.
        use_buffers: whether buffers are averaged too; else they are always the module's.
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
        """Take the module's weights into the average; the first ones are the average."""
        if not self.num_averaged:
            self._averaged.update_parameters(self.module)
        else:  # as update_parameters does, which sends its counter to the device in each step, and waits for that
            for averages, weights in self._groups.values():
                self._average(averages, weights, self.num_averaged)
        self.num_averaged += 1

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the average into the module, and the module's weights in its place; a second time, back again."""
        for mine, theirs in self._pairs:
            weights = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(weights)

    @torch.no_grad()
    def weights(self) -> StateDict:
        """Return the average as the module's ``state_dict``, whose tensors the next update changes."""
        if not self._use_buffers:
            for mine, theirs in zip(self._averaged.module.buffers(), self.module.buffers(), strict=True):
                mine.copy_(theirs)
        return self._averaged.module.state_dict()

    def state_dict(self) -> StateDict:
        """State to resume from."""
        return {"num_averaged": self.num_averaged, "weights": self.weights() if self.num_averaged else {}}

    def load_state_dict(self, state: StateDict) -> None:
        """Take back :meth:`state_dict`."""
        self.num_averaged = state["num_averaged"]
        if self.num_averaged:
            self._averaged.module.load_state_dict(state["weights"])
