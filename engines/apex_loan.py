"""What ``amp.initialize`` does to the user's objects, noted so that they can be given back as they came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Loan:
    """The attributes that Apex sets on a model (its ``forward``) or on an optimizer (``step``, and more)."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before = dict(vars(owner))
        self._changed: set[str] = set()

    def note_changes(self) -> None:
        """Tell what was set since the loan began, now that Apex has done its part."""
        now = vars(self._owner)
        self._changed = {name for name in now if now[name] is not self._before.get(name)}
        self._changed -= {"state", "param_groups", "defaults"}  # an optimizer's data, which go on
        if isinstance(self._owner, Optimizer):
            self._changed.add("step")  # Apex sets it again for each step that it is going to skip

    def give_back(self) -> None:
        """Undo that; also what a scheduler put around Apex's ``step``."""
        for name in self._changed:
            vars(self._owner).pop(name, None)
            if name in self._before:
                setattr(self._owner, name, self._before[name])


class MasterWeights:
    """The fp32 weights that an optimizer steps on under O2, each beside the model's own in fp16; else none."""

    def __init__(self, optimizer: Optimizer) -> None:
        weights = _parameters(optimizer)
        # Apex makes them when it is first asked to clear gradients: now, before a checkpoint's state is loaded, which
        # would be rounded to fp16 with the weights that the optimizer has until then.
        optimizer.zero_grad()
        self._optimizer = optimizer
        self._pairs = [(w, m) for w, m in zip(weights, _parameters(optimizer), strict=True) if m is not w]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's weights: Apex would put the old ones back in the next step."""
        for weight, master in self._pairs:
            master.copy_(weight)

    def state(self) -> list[Tensor]:
        """List the masters, in the optimizer's order."""
        return [master.detach() for _, master in self._pairs]

    def matches(self, state: list[Tensor]) -> bool:
        """Whether :meth:`load` can take `state`."""
        return [each.shape for each in state] == [master.shape for _, master in self._pairs]

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        """Take back :meth:`state`."""
        for (_, master), saved in zip(self._pairs, state, strict=True):
            master.copy_(saved)

    def give_back(self) -> None:
        """Make the masters the model's weights, and these again the optimizer's."""
        weight_of = {}
        for weight, master in self._pairs:
            weight.grad, weight.data = None, master.data
            weight_of[master] = weight
        for group in self._optimizer.param_groups:
            group["params"] = [weight_of.get(each, each) for each in group["params"]]
        for master, weight in weight_of.items():
            if master in self._optimizer.state:
                self._optimizer.state[weight] = self._optimizer.state.pop(master)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]
