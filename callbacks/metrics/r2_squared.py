"""R2, the fraction of the targets' variance that a regression explains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runnerkit.callbacks.metrics.parts.batch_keys import pick
from runnerkit.callbacks.metrics.parts.loader_state import LoaderStateCallback
from runnerkit.callbacks.metrics.parts.loader_sums import Sums, as_floats, ratio, widest
from runnerkit.metrics.reduction import Share, on_cpu
from runnerkit.support.arguments import check_keys, check_strings
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["R2SquaredCallback"]


class ShiftedSums:
    """Sums of one process's targets and of their squares, after subtraction of a shift: its first target.

    The shift removes a large mean, which thus does not cost precision. If the first target is an outlier, it may: one
    of N targets is at most sqrt(N) deviations from their mean, which magnifies rounding by N.

    Args:
        rank, num_processes: position of the share among those of all ranks, since shifts cannot be summed.
    """

    def __init__(self, *, rank: int, num_processes: int) -> None:
        self._rank, self._num_processes = rank, num_processes
        self._sums: Sums = {}

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch, (N, D) each; no host sync."""
        if not len(targets):
            return
        shift = self._sums["shift"] if self._sums else targets[0].clone()
        offsets, errors = targets - shift, targets - outputs
        sums = {
            "num": targets.new_full((), len(targets), dtype=torch.int64),
            "offsets": offsets.sum(dim=0),
            "squares": offsets.square().sum(dim=0),
            "errors": errors.square().sum(dim=0),
        }
        known = self._sums
        self._sums = {"shift": shift, **{name: known[name] + each if known else each for name, each in sums.items()}}

    def share(self) -> Share | None:
        """Return {name: (num_processes, ...)}, zero except for this process's row."""
        if not self._sums:
            return None
        places = {name: each.new_zeros((self._num_processes, *each.shape)) for name, each in self._sums.items()}
        for name, each in places.items():
            each[self._rank] = self._sums[name]
        return Share(places)

    def state_dict(self) -> StateDict:
        return {name: each.cpu() for name, each in self._sums.items()}

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        for state in states:
            if state:
                sums = {name: each.to(device) for name, each in state.items()}
                self._sums = merged(self._sums, sums) if self._sums else sums


def merged(sums: Sums, others: Sums) -> Sums:
    """Add sums with different shifts; the result has the first one's shift."""
    num, distance = others["num"], others["shift"] - sums["shift"]
    offsets = others["offsets"] + num * distance
    squares = others["squares"] + distance * (2 * others["offsets"] + num * distance)
    return {
        "num": sums["num"] + num,
        "shift": sums["shift"],
        "offsets": sums["offsets"] + offsets,
        "squares": sums["squares"] + squares,
        "errors": sums["errors"] + others["errors"],
    }


class R2SquaredCallback(LoaderStateCallback[ShiftedSums]):
    """Log ``r2squared``: 1 - sum((t - y)^2) / sum((t - mean(t))^2), averaged over the outputs.

    For constant targets, it is 1 if all outputs are exact and 0 otherwise; for a single target, NaN. This follows
    scikit-learn's ``r2_score``. Nine digits are exact even for targets with a large mean, such as times in seconds.

    Args:
        input_key: y, (N,) or (N, D) float in ``runner.batch``.
        target_key: t, with as many elements, in ``runner.batch``.
        prefix, suffix: added to the name.

    >>> R2SquaredCallback("logits", "targets").provides
    ('r2squared',)
    """

    def __init__(
        self, input_key: str, target_key: str, *, prefix: str | None = None, suffix: str | None = None
    ) -> None:
        super().__init__()
        check_keys(self, input_key=input_key, target_key=target_key)
        check_strings(self, or_none=True, prefix=prefix, suffix=suffix)
        self.input_key, self.target_key = input_key, target_key
        self.provides = (f"{prefix or ''}r2squared{suffix or ''}",)

    def new_state(self, runner: IRunner) -> ShiftedSums:
        return ShiftedSums(rank=runner.engine.rank, num_processes=runner.engine.num_processes)

    def on_batch_end(self, runner: IRunner) -> None:
        (outputs, targets), _ = pick(runner, self.input_key, self.target_key, reader=type(self).__name__)
        if outputs.numel() != targets.numel() or outputs.shape[:1] != targets.shape[:1] or not targets.ndim:
            raise ValueError(f"expected outputs and targets (N, D), got {tuple(outputs.shape)}, {tuple(targets.shape)}")
        columns = [widest(each.detach()).reshape(len(targets), targets[:1].numel()) for each in (outputs, targets)]
        self.state(runner).add(*columns)

    def finish(self, runner: IRunner, state: ShiftedSums, total: Share) -> None:
        columns = on_cpu(total.sums)
        of_ranks = [{name: column[rank] for name, column in columns.items()} for rank in range(len(columns["num"]))]
        sums = reduce(merged, (each for each in of_ranks if each["num"]))
        runner.loader_metrics.update(as_floats({self.provides[0]: r2_squared(sums)}))


def r2_squared(sums: Sums) -> Tensor:
    """Compute R2, a () tensor, from sums with any shift."""
    variation = (sums["squares"] - sums["offsets"].square() / sums["num"]).clamp(min=0)
    of_constant = (sums["errors"] == 0).to(variation.dtype)
    values = torch.where(variation == 0, of_constant, 1 - ratio(sums["errors"], variation, zero_division=0))
    return torch.where(sums["num"] < 2, torch.nan, values.mean())
