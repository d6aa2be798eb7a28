"""The results of a run, transferred back to the calling process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from runnerkit.engine import IEngine
from runnerkit.loop.attributes import Components, ProcessAttributes, ProcessState
from runnerkit.seeding.initialization import is_left_to_checkpoint, mark_left_to_checkpoint
from runnerkit.support import pickling
from runnerkit.support.component_members import StateMembers
from runnerkit.support.device_move import move
from runnerkit.types import as_dict, is_maker

if TYPE_CHECKING:
    from runnerkit.callback import ICallback, IRunner

logger = logging.getLogger(__name__)


@dataclass
class RunResult:
    """Attributes of the runner after its run: components, metrics, counters, callbacks and user-defined ones."""

    attributes: dict[str, Any]

    @classmethod
    def of(cls, runner: IRunner, *, had: Mapping[str, Any]) -> Self:
        """Collect the result for :meth:`apply`.

        Args:
            had: :func:`data_of` the runner at the start of the run; unchanged ones are not transferred.
        """
        stays = ProcessAttributes.names() | {name for name, value in had.items() if vars(runner).get(name) is value}
        stays |= {name for name, value in vars(runner).items() if isinstance(value, ProcessState)}
        return cls({name: value for name, value in vars(runner).items() if name not in stays})

    def apply(self, runner: IRunner, *, given: Mapping[str, ICallback]) -> None:
        """Store the result in the calling process's runner; objects passed in by the user are updated in place.

        Args:
            given: callbacks passed in by the user.
        """
        theirs = dict(self.attributes)
        for name in Components.names():
            setattr(runner, name, _adopted(name, getattr(runner, name), theirs.pop(name)))
        for key, callback in theirs["callbacks"].items():
            if key in given and given[key] is not callback:
                vars(given[key]).update(vars(callback))
                theirs["callbacks"][key] = given[key]
        vars(runner).update(theirs)

    def __getstate__(self) -> dict[str, Any]:
        """Prepare for transfer: move to the CPU, leave out user attributes that cannot be pickled."""
        for name in ("model", "criterion"):
            for component in as_dict(self.attributes[name]).values():
                if isinstance(component, nn.Module):
                    component._apply(_on_cpu)
        for optimizer in as_dict(self.attributes["optimizer"]).values():
            state = optimizer.state
            for parameter in state:
                state[parameter] = move(state[parameter], torch.device("cpu"))
        try:
            data = pickling.dumps(self.attributes)  # together, so that objects they share stay shared
        except Exception:
            data = pickling.dumps(self._picklable())
        return {"data": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.attributes = pickling.loads(state["data"])

    def _picklable(self) -> dict[str, Any]:
        components = {name: self.attributes[name] for name in Components.names()}
        callbacks = {
            key: callback if _refusal(callback) is None else _picklable_copy(callback, f"callbacks[{key!r}]")
            for key, callback in self.attributes["callbacks"].items()
        }
        rest = {name: value for name, value in self.attributes.items() if name not in {*components, "callbacks"}}
        return {**components, "callbacks": callbacks, **_picklable_attributes(rest, "")}


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.cpu()  # a tensor of the meta device cannot be moved


def _picklable_copy(callback: Any, name: str) -> Any:
    """Copy a callback without attributes that cannot be pickled, such as a lock."""
    copy = object.__new__(type(callback))
    vars(copy).update(_picklable_attributes(vars(callback), f"{name}."))
    return copy


def _picklable_attributes(attributes: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Leave out attributes that cannot be pickled, with a warning, so that the other results are not lost."""
    refusals = {name: _refusal(value) for name, value in attributes.items()}
    for name, error in refusals.items():
        if error is not None:
            logger.warning("runner.%s%s stays in the process that trained: %s", prefix, name, error)
    return {name: value for name, value in attributes.items() if refusals[name] is None}


def _refusal(value: Any) -> Exception | None:
    try:
        pickling.dumps(value)
    except Exception as error:
        return error
    return None


def data_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes that are engines, data sets or loaders, or dicts of data; the calling process has them too."""
    return {name: value for name, value in attributes.items() if _is_data(value) or isinstance(value, IEngine)}


def _is_data(value: Any) -> bool:
    parts = list(value.values()) if isinstance(value, dict) else [value]
    return bool(parts) and all(isinstance(each, Dataset | DataLoader) for each in parts)


def _adopted(name: str, mine: Any, theirs: Any) -> Any:
    """Return the component of the calling process, with the state of the one that was trained, or else the latter."""
    old, new = as_dict(mine), as_dict(theirs)
    if old.keys() != new.keys():
        return theirs
    if name in ("optimizer", "scheduler") and any(map(is_maker, old.values())):
        return theirs
    try:
        for key, each in old.items():
            if each is not new[key] and StateMembers(each).load_state_dict is not None:
                each.load_state_dict(new[key].state_dict())
            if isinstance(each, nn.Module) and is_left_to_checkpoint(new[key]):
                mark_left_to_checkpoint(each)
    except (RuntimeError, ValueError, KeyError):
        return theirs  # a hook replaced the one that was passed in
    return mine
