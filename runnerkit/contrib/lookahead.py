"""The Lookahead optimizer: slow weights that follow any optimizer's weights every k steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runnerkit.support.torch_internals import interpolate_each_

__all__ = ["Lookahead"]

_SLOW = "slow_param"


class Lookahead(Optimizer):
    """A wrapper that every `k` steps moves slow weights by `alpha` towards the optimizer's, then copies them back.

    This is Algorithm 1 of Zhang et al. 2019, arXiv:1907.08610; the optimizer keeps its momentum. Between these
    synchronizations, evaluation uses the optimizer's weights, as training does.

    The parameter groups and the state are those of the optimizer, so a scheduler of either acts on both, and the slow
    weights (in the state, as "slow_param") and the step count (in the groups) are saved, sharded and moved with the
    rest. Steps that the gradient scaler skips do not count. HorovodEngine cannot wrap it and raises an error.

    Args:
        optimizer: any torch optimizer.
        k: steps between two synchronizations, >= 1.
        alpha: in (0, 1]; 1 is equivalent to the optimizer alone.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> optimizer = Lookahead(torch.optim.SGD([weight], lr=0.5), k=2, alpha=0.5)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    >>> weight.item()  # from 1 to 0 and half the way back
    0.5
    """

    counters = ("lookahead_step",)  # in the groups, beside options

    def __init__(self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, Lookahead):
            raise TypeError(f"Lookahead must wrap a torch optimizer other than Lookahead, got a {type(optimizer)}")
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be an integer >= 1, got {k}")
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], got {alpha}")
        own = {"lookahead_k": k, "lookahead_alpha": alpha}
        # As if unpickled: Optimizer.__init__ would create groups and a state instead of using the optimizer's.
        self.__setstate__({"optimizer": optimizer, "defaults": {**optimizer.defaults, **own}})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.optimizer: Optimizer = state["optimizer"]
        self._first: dict[Tensor, Tensor] = {}  # weights before their first step, during that step only
        for group in self.param_groups:
            self._join(group)

    def _join(self, group: dict[str, Any]) -> None:
        for name in ("lookahead_k", "lookahead_alpha"):
            group.setdefault(name, self.defaults[name])
        group.setdefault("lookahead_step", 0)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in torch
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in torch
        """The wrapped optimizer's."""
        return self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are synchronized with their slow weights every `k` steps from now."""
        self.optimizer.add_param_group(param_group)
        self._join(self.param_groups[-1])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer, and every `k` steps the slow weights; return the optimizer's result."""
        if closure is None:
            self._keep_first()
            loss: Any = self.optimizer.step()
        else:

            def evaluate() -> Any:
                loss = closure()
                self._keep_first()  # gradients exist now
                return loss

            loss = self.optimizer.step(evaluate)
        for weight, first in self._first.items():
            self.state[weight][_SLOW] = first
        self._first.clear()
        for group in self.param_groups:
            self._join(group)  # also groups added to the wrapped optimizer
            group["lookahead_step"] = (group["lookahead_step"] + 1) % group["lookahead_k"]
            if group["lookahead_step"] == 0:
                self._update_slow_weights(group)
        return loss

    def _keep_first(self) -> None:
        # Added to the state after the step, because many optimizers initialize theirs in a step that finds it empty.
        # Weights without a gradient do not change.
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight not in self._first and _SLOW not in self.state.get(weight, {}):
                    self._first[weight] = weight.detach().clone()

    @torch.no_grad()
    def _update_slow_weights(self, group: dict[str, Any]) -> None:
        fast = [weight for weight in group["params"] if _SLOW in self.state.get(weight, {})]
        if fast:
            slow = [self.state[weight][_SLOW] for weight in fast]
            interpolate_each_(slow, fast, group["lookahead_alpha"])
            interpolate_each_(fast, slow, 1.0)  # an exact copy; torch's copy of many does not support sharded tensors

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer, which includes the slow weights."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`; if it is from a plain optimizer, slow weights start at the current weights."""
        self._first.clear()
        self.optimizer.load_state_dict(state_dict)
        for group in self.param_groups:
            self._join(group)
