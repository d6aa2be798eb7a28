"""Weights for evaluation that an optimizer exchanges with those it trains, as schedule-free ones do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runnerkit.support.component_members import OptimizerMembers


class EvaluationWeights:
    """The optimizers of a stage that have ``train()`` and ``eval()``, which change the weights in place.

    Changing there and back rounds. An evaluation must not change the training, so the trained weights are kept during
    one and put back exactly.

    >>> bool(EvaluationWeights([torch.optim.SGD([torch.ones(1)])]))
    False
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        members = [(each, OptimizerMembers(each)) for each in optimizers]
        self._optimizers = [each for each, its in members if callable(its.train) and callable(its.eval)]
        self._kept: list[tuple[Tensor, Tensor]] | None = None  # weights, and their values in training

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    @torch.no_grad()
    def train(self) -> None:
        """Switch to the weights in training."""
        for each in self._optimizers:
            each.train()
        for weight, trained in self._kept or ():
            weight.copy_(trained)
        self._kept = None

    @torch.no_grad()
    def eval(self) -> None:
        """Switch to the weights for evaluation."""
        if not self._optimizers or self._kept is not None:
            return
        groups = [group for each in self._optimizers for group in each.param_groups]
        self._kept = [(weight, weight.detach().clone()) for group in groups for weight in group["params"]]
        for each in self._optimizers:
            each.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate in the body, then restore the previous weights."""
        was_training = self._kept is None
        self.eval()
        try:
            yield
        finally:
            if was_training:
                self.train()

    def end(self) -> None:
        """End with the weights for evaluation, which stay whatever else is evaluated."""
        self.eval()
        self._optimizers, self._kept = [], None
