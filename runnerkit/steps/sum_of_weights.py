"""The sum of the relative weights of a step's batches, by which its gradients are divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runnerkit.metrics.reduction import Processes
from runnerkit.types import widest_float

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


class SumOfWeights:
    """The relative weights of the batches that are accumulated for a step of one optimizer, which divide its gradients.

    Attributes:
        is_empty: whether no batch was weighed: then each of them counts as 1.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self.is_empty = True
        # What the weights that all ranks know add to the number of batches: a usual batch, of weight 1, adds nothing.
        self._surplus: Any = 0.0
        self._asked: Any = 0.0  # sum of those whose mean over processes has to be asked for
        self._num_asked = self._num_given = 0
        self._mean_asked: Callable[[], Any] | None = None  # waits for it

    def add(self, relative: float | Tensor | None, runner: IRunner, *, is_asked: bool, is_last: bool) -> None:
        """Add the relative weight of the current batch before its backward pass; every rank must call.

        Args:
            relative: None is 1.
            is_asked: whether it is that of this process only.
            is_last: whether the step follows: then the processes' weights are summed while the backward pass runs.
        """
        self.is_empty = False
        self._num_given += runner.batch_weight is not None
        if not is_asked:
            self._surplus += 0.0 if relative is None else relative - 1.0
            return
        self._asked = self._asked + relative if self._num_asked else relative
        self._num_asked += 1
        if is_last:
            self._mean_asked = total_weight(runner.engine.data_parallel, self._asked)

    def divisor(self, runner: IRunner, *, num_batches: int) -> Any:
        """Return the sum of the relative weights of the step's batches, a mean over processes; see :func:`divisor_of`.

        Raises:
            ValueError: only some of the batches had a `batch_weight`, or a loss that was weighed.
        """
        if runner.loss_reduction == "sum":
            return 1
        if self._num_given not in (0, num_batches):
            raise ValueError(
                f"batch_weight was set in {self._num_given} of the {num_batches} batches of a step: set it in every "
                "batch, on all ranks, or in none, before the batch's backward pass, which may not be left out: "
                "backpropagate 0 * loss if a batch teaches nothing"
            )
        if self._num_asked not in (0, num_batches):
            raise ValueError(
                f"only {self._num_asked} of the {num_batches} batches of a step had a backward pass, and the weights "
                "of the others are not known: backpropagate 0 * loss if a batch teaches nothing"
            )
        if not self._num_asked:
            total = num_batches + self._surplus
        else:
            # Not under way if the loader has ended within a group of batches: then no batch was said to be the last.
            total = (self._mean_asked or total_weight(runner.engine.data_parallel, self._asked))()
            self._mean_asked = None
        return divisor_of(total)


def total_weight(ranks: Processes, relative: float | Tensor) -> Any:
    """Start to sum relative weights over ranks; return a function that waits for the mean, a number or a () tensor."""
    if not isinstance(relative, Tensor) or relative.device != ranks.device:  # else it is of the widest type there
        relative = on_device(relative, ranks.device)
    total = ranks.start_sum(relative)
    if ranks.device.type == "cpu":
        return lambda: total().item() / ranks.num_processes
    return lambda: total() / ranks.num_processes


def divisor_of(total: Any) -> Any:
    """Return a sum of relative weights as a divisor: a number, or a () tensor on a GPU, without waiting for it."""
    if isinstance(total, Tensor) and total.device.type != "cpu":
        return torch.where(total == 0, 1.0, total).float()
    return float(total) or 1.0  # no batch weighs anything: its gradients are zero


def on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        value = value.detach() if value.requires_grad else value
        return value.to(device, widest_float(device))
    return torch.full((), value, dtype=widest_float(device), device=device)  # without a copy from the host
