"""Records of what ``amp.initialize`` changes in the user's models and optimizers, to restore them after a stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from runnerkit.types import parameters_of


class PatchedAttributes:
    """The attributes that Apex sets on a model (its ``forward``) or on an optimizer (``step``, and more)."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before = dict(vars(owner))
        self._changed: set[str] = set()

    def record_changes(self) -> None:
        """Record which attributes Apex has set since this object was created."""
        now = vars(self._owner)
        self._changed = {name for name in now if now[name] is not self._before.get(name)}
        self._changed -= {"state", "param_groups", "defaults"}  # an optimizer's data, which is kept
        if isinstance(self._owner, Optimizer):
            self._changed.add("step")  # Apex replaces it again before each step that it skips

    def restore(self) -> None:
        """Restore those attributes; this also removes a scheduler's wrapper around Apex's ``step``."""
        for name in self._changed:
            vars(self._owner).pop(name, None)
            if name in self._before:
                setattr(self._owner, name, self._before[name])


class MasterWeights:
    """The fp32 master weights of an optimizer under O2, each paired with the model's fp16 weight; otherwise empty."""

    def __init__(self, optimizer: Optimizer) -> None:
        weights = [*parameters_of(optimizer)]
        # Apex creates the master weights in the first zero_grad(). Call it before a checkpoint's state is loaded:
        # until then the optimizer holds the fp16 weights, and loading would round its state to fp16.
        optimizer.zero_grad()
        self._optimizer = optimizer
        self._pairs = [(w, m) for w, m in zip(weights, parameters_of(optimizer), strict=True) if m is not w]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's weights into the masters; otherwise Apex would restore the old ones in the next step."""
        for weight, master in self._pairs:
            master.copy_(weight)

    def state(self) -> list[Tensor]:
        """List the master weights in the optimizer's order."""
        return [master.detach() for _, master in self._pairs]

    def matches(self, state: list[Tensor]) -> bool:
        """Return whether :meth:`load` accepts `state`."""
        return [each.shape for each in state] == [master.shape for _, master in self._pairs]

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        """Load what :meth:`state` returned."""
        for (_, master), saved in zip(self._pairs, state, strict=True):
            master.copy_(saved)

    def restore(self) -> None:
        """Move the master values into the model's weights, and point the optimizer at those weights again."""
        weight_of = {}
        for weight, master in self._pairs:
            weight.grad, weight.data = None, master.data
            weight_of[master] = weight
        for group in self._optimizer.param_groups:
            group["params"] = [weight_of.get(each, each) for each in group["params"]]
        for master, weight in weight_of.items():
            if master in self._optimizer.state:
                self._optimizer.state[weight] = self._optimizer.state.pop(master)


class UnroundedValues:
    """Values before Apex rounds them to fp16 of what no optimizer steps on: frozen parameters, buffers, and all weights
    if nothing is trained. They are kept in host memory.

    Args:
        stepped: parameters that an optimizer steps on.
    """

    def __init__(self, models: Iterable[nn.Module], *, stepped: Collection[Tensor]) -> None:
        self._places = [
            (module, name, value.detach().to("cpu", copy=True))
            for model in models
            for module in model.modules()
            for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if value not in stepped and not is_lazy(value) and value.is_floating_point()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values that were rounded and have not changed since."""
        for value, before in self._unchanged():
            value.copy_(before)

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values, in host memory, of those among `tensors` that were rounded."""
        before = {id(value): kept for value, kept in self._unchanged()}
        return {name: before[id(each)] for name, each in tensors.items() if id(each) in before}

    def _unchanged(self) -> list[tuple[Tensor, Tensor]]:
        pairs = [(getattr(module, name), before) for module, name, before in self._places]
        return [(value, before) for value, before in pairs if torch.equal(value.cpu().half(), before.half())]
