"""How much of the targets' variance a regression explains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runnerkit.arguments import check_keys, check_strings
from runnerkit.callbacks.keys import pick
from runnerkit.callbacks.loader_state import LoaderStateCallback
from runnerkit.callbacks.loader_sums import Sums, as_floats, ratio, widest
from runnerkit.fused_reduction import Share, on_cpu
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class ShiftedSums:
    """Sums of one process's targets and of their squares, each less a shift: its first target.

    A large mean costs no digits, since the shift takes it away first. An outlier that comes first may: one of N targets
    is at most sqrt(N) deviations from their mean, which magnifies rounding by N.

    Args:
        rank, num_processes: where the share has its place among those of all: shifts do not add up.
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
        """Give {name: (num_processes, ...)}, zero but in this process's place."""
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
    """Add up sums of two shifts, as those of the first one's."""
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

    Targets that do not vary have 1 if all are met, else 0; a single one has NaN: all as scikit-learn's ``r2_score``.
    Exact to nine digits also where targets are far from zero and close to each other, such as times in seconds.

    Args:
        input_key: y, (N,) or (N, D) float in ``runner.batch``.
        target_key: t, of as many elements, in ``runner.batch``.
        prefix, suffix: around the name.

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
    """Compute the value, (), from sums of any shift."""
    variation = (sums["squares"] - sums["offsets"].square() / sums["num"]).clamp(min=0)
    of_constant = (sums["errors"] == 0).to(variation.dtype)
    values = torch.where(variation == 0, of_constant, 1 - ratio(sums["errors"], variation, zero_division=0))
    return torch.where(sums["num"] < 2, torch.nan, values.mean())
