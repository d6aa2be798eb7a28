"""Detection of the first batch with a metric that is NaN or infinite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from runnerkit.errors import did_you_mean
from runnerkit.types import StateDict, widest_float

Place = tuple[int, int, str]  # batch, rank, key: the smallest is the first


class FirstNonFinite:
    """A record of the first batch in which each metric was not finite, on the device until :meth:`find` reads it."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, ...], Tensor] = {}  # (len(keys),); infinity for metrics that were always finite
        self._host_steps: dict[str, float] = {}

    def add(self, keys: tuple[str, ...], values: Tensor, batch_step: int) -> None:
        """Check the values of one batch, (len(keys),) of any dtype; no host sync."""
        # Not in the dtype of the values: bf16 cannot count to 300.
        good = torch.full(values.shape, math.inf, dtype=widest_float(values.device), device=values.device)
        steps = torch.where(values.isfinite(), good, batch_step)
        self._steps[keys] = torch.minimum(self._steps.get(keys, good), steps)

    def add_number(self, key: str, value: float, batch_step: int) -> None:
        """Check one value that is on the host."""
        if not math.isfinite(value):
            self._host_steps.setdefault(key, batch_step)

    def find(self, *, rank: int) -> Place | None:
        """Return the first place in this process, with one copy to the host."""
        on_device = [pair for keys, steps in self._steps.items() for pair in zip(keys, steps.tolist(), strict=True)]
        found = [*on_device, *self._host_steps.items()]
        return min(((int(step), rank, key) for key, step in found if step < math.inf), default=None)

    def state_dict(self) -> StateDict:
        """Return the state for a checkpoint in the middle of an epoch."""
        steps = [(list(keys), each.cpu()) for keys, each in self._steps.items()]
        return {"steps": steps, "host_steps": dict(self._host_steps)}

    def load_state_dict(self, state: StateDict, *, device: torch.device) -> None:
        """Merge the :meth:`state_dict` of one process; call this once for each process."""
        for keys, steps in state["steps"]:
            known = self._steps.get(tuple(keys))
            steps = steps.to(device)
            self._steps[tuple(keys)] = steps if known is None else torch.minimum(known, steps)
        for key, step in state["host_steps"].items():
            self._host_steps[key] = min(step, self._host_steps.get(key, math.inf))


def describe_first(places: list[Place | None], *, loader_key: str, epoch: int) -> str:
    """Describe the first place over all processes, in the same words on every rank.

    >>> describe_first([None, (7, 1, "loss")], loader_key="train", epoch=2).partition(",")[0]
    "batch_metrics['loss'] was not finite in batch 7 of loader 'train'"
    """
    batch, rank, key = min(place for place in places if place is not None)
    return (
        f"batch_metrics[{key!r}] was not finite in batch {batch} of loader {loader_key!r}, epoch {epoch}, rank {rank}, "
        'the first such batch; non_finite="locate" names the module, "keep" ignores it'
    )


def check_policy(non_finite: Any) -> None:
    """Raise unless the policy is known.

    Raises:
        ValueError: it is not "raise", "locate" or "keep".
    """
    if non_finite not in ("raise", "locate", "keep"):
        found = f'non_finite must be "raise", "locate" or "keep", got {non_finite!r}'
        raise ValueError(found + did_you_mean(non_finite, ("raise", "locate", "keep")))
