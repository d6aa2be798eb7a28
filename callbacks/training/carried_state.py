"""A model's state that is carried from batch to batch, as in truncated backpropagation through time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.support.arguments import check_strings
from runnerkit.types import StateDict, each_tensor

if TYPE_CHECKING:
    from runnerkit.engine import IEngine
    from runnerkit.runner import IRunner

__all__ = ["CarriedStateCallback"]


class CarriedStateCallback(Callback):
    """Carry an attribute of the runner, such as the hidden state of an RNN, to the next batch and into checkpoints.

    It is None at the first batch of each pass, detached after every batch, and kept while a validation interrupts the
    training loader. A run that resumes within an epoch has its rows again, with any number of processes that divides
    them: row i of N processes is row i // N of process i % N, as in :class:`runnerkit.dl.SequenceRows`.

    Args:
        attribute: name of the runner's attribute, which `handle_batch` reads and sets: a tensor, or tensors in nested
            tuples, lists and dicts.
        dim: dimension of the rows in each tensor; 1 for the state of torch's RNNs.

    >>> CarriedStateCallback("hidden").attribute
    'hidden'
    """

    def __init__(self, attribute: str = "hidden", *, dim: int = 1) -> None:
        super().__init__(order=CallbackOrder.Internal)
        check_strings(self, attribute=attribute)
        self.attribute, self.dim = attribute, dim
        self._outer: list[Any] = []  # states of loaders that a validation interrupted
        self._runner: IRunner | None = None  # while a stage runs
        self._loaded: Any = None

    def on_stage_start(self, runner: IRunner) -> None:
        self._runner = runner

    def on_stage_end(self, runner: IRunner) -> None:
        self._runner = None

    def on_loader_start(self, runner: IRunner) -> None:
        self._outer.append(self._state(runner))
        loaded, self._loaded = self._loaded, None
        is_resumed = loaded is not None and runner.loader_batch_step > 0
        setattr(runner, self.attribute, self._own_part(loaded, runner.engine) if is_resumed else None)

    def on_batch_end(self, runner: IRunner) -> None:
        setattr(runner, self.attribute, each_tensor(self._state(runner), Tensor.detach))

    def on_loader_end(self, runner: IRunner) -> None:
        setattr(runner, self.attribute, self._outer.pop())

    def state_dict(self) -> StateDict:
        runner = self._runner
        if runner is None or not runner.is_within_loader:
            return {}
        # Every rank calls this when a checkpoint is saved.
        of_ranks = runner.engine.data_parallel.gather_object(each_tensor(self._state(runner), Tensor.cpu))
        return {"state": _merged(of_ranks, self.dim)}

    def load_state_dict(self, state: StateDict) -> None:
        self._loaded = state.get("state")

    def _state(self, runner: IRunner) -> Any:
        return getattr(runner, self.attribute, None)

    def _own_part(self, state: Any, engine: IEngine) -> Any:
        def own(rows: Tensor) -> Tensor:
            ranks = engine.data_parallel
            places = torch.arange(ranks.rank, rows.shape[self.dim], ranks.num_processes)
            return rows.index_select(self.dim, places).to(engine.device)

        return each_tensor(state, own)


def _merged(of_ranks: list[Any], dim: int) -> Any:
    """Interleave the rows of all ranks."""
    tensors: list[list[Tensor]] = [[] for _ in of_ranks]
    for state, found in zip(of_ranks, tensors, strict=True):
        each_tensor(state, found.append)
    rows = zip(*tensors, strict=True)
    return each_tensor(of_ranks[0], lambda _: torch.stack(next(rows), dim=dim + 1).flatten(dim, dim + 1))
