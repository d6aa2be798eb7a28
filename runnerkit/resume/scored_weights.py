"""The weights that an evaluation scored, kept until a checkpoint is saved with the score."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runnerkit.callback import ICallback, innermost, method_of, optimizer_callbacks
from runnerkit.checkpoints.plain_state import copied
from runnerkit.resume.run_weights import RunWeights
from runnerkit.support import device_move
from runnerkit.support.torch_internals import is_dtensor, local
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

_AFTER_A_LOADER = ("on_loader_end", "on_validation_end", "on_step_end", "on_epoch_end")
_IN_A_LOADER = ("on_loader_start", "on_batch_start", "on_batch_end")


class ScoredWeights:
    """This process's part of the weights at the end of an evaluation loader, which may change before they are saved.

    Args:
        runner: has just ended the loader; no callback has acted on its end.

    Attributes:
        state: a copy; None if nothing that could change the weights precedes the save, or another rank saves them.
    """

    def __init__(self, runner: IRunner) -> None:
        self._batch_step = runner.batch_step
        self.state: StateDict | None = None
        if _may_change(runner):
            self.state = _copied(RunWeights(runner).evaluated(whole=False), is_saver=runner.engine.is_main_process)

    def are_known(self, runner: IRunner) -> bool:
        """Return whether they can be saved: they were copied, or no training has followed."""
        return self.state is not None or self._batch_step == runner.batch_step


def _copied(weights: StateDict, *, is_saver: bool) -> StateDict | None:
    """Copy this process's shards, or whole weights in the process that saves them."""
    if any(map(is_dtensor, _tensors(weights))):
        shards: StateDict = device_move.copied(weights)
        return shards
    return copied(weights) if is_saver else None


def _may_change(runner: IRunner) -> bool:
    """Return whether the weights may change before they are saved with the score of the loader that has ended."""
    keys = list(runner.loaders)
    later = keys[keys.index(runner.loader_key) + 1 :]
    if any(key.startswith("train") for key in later):
        return True
    if any(each.num_pending for each in optimizer_callbacks(runner.callbacks)):
        return True  # a save waits for the accumulated step
    if later and not _is_own(runner.handle_batch):
        return True
    events = (*_AFTER_A_LOADER, *_IN_A_LOADER) if later else _AFTER_A_LOADER
    callbacks = [innermost(each) for each in runner.callbacks.values()]
    return any(_changes_weights(each, event) for each in [runner, *callbacks] for event in events)


def _changes_weights(listener: Any, event: str) -> bool:
    if not listener.listens_to(event):
        return False
    return (isinstance(listener, ICallback) and listener.changes_weights) or not _is_own(method_of(listener, event))


def _is_own(method: Callable[..., Any]) -> bool:
    return str(method.__module__).startswith("runnerkit.")


def _tensors(state: StateDict) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two states hold equal values of the same types."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        mine, theirs = local(one), local(other)
        if mine.dtype != theirs.dtype or mine.layout is not torch.strided:
            return False  # torch compares no sparse tensors
        return torch.equal(mine, theirs.to(mine.device))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return type(one) is type(other) and bool(one == other)
