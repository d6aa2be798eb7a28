"""Whether a run can go on from a checkpoint, said in words: what cannot be is refused, what differs is warned of.

Refused are another model, another kind of optimizer, an unknown format or place. A changed setting (a hyperparameter,
the seed) only makes it another run from here on, which may be what the user wants.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from runnerkit.plain_values import flat, plain
from runnerkit.redaction import redacted
from runnerkit.storage.weights import listed
from runnerkit.types import StateDict, as_dict
from runnerkit.version import __version__
from runnerkit.warmup import WarmupLR

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1  # of what is written; OLDEST_FORMAT is the first of those that are read
OLDEST_FORMAT = 1
_NUM_NAMED = 5  # parameters of each kind of misfit, settings ten times as many
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the string of an object; another in each process


def check_format(state: Any, path: Path) -> None:
    """Refuse what is no state of a run, or of a format that this version does not read.

    Raises:
        ValueError: with the versions.
    """
    if not isinstance(state, dict) or "format_version" not in state:
        raise ValueError(f"{path} is no checkpoint of a whole run; to start from its weights, load them into the model")
    version, writer = state["format_version"], state.get("runnerkit_version", "of an unknown version")
    if not isinstance(version, int) or not OLDEST_FORMAT <= version <= FORMAT_VERSION:
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        raise ValueError(
            f"{path} has format {version!r}, written by runnerkit {writer}; this is runnerkit {__version__}, which "
            f"reads {OLDEST_FORMAT} to {FORMAT_VERSION}: "
            + ("upgrade it" if is_newer else "go on with the version that wrote it, or load its weights only")
        )


def check_place(runner: IRunner, state: StateDict, path: Path) -> None:
    """Refuse a checkpoint of a stage that the runner does not have.

    Raises:
        ValueError: with those that it has.
    """
    stages = list(runner._hooks.stages)
    if state["stage_key"] not in stages:
        raise ValueError(f"{path} is of stage {state['stage_key']!r}; the runner has the stages {stages}")


def check_loader(runner: IRunner, within: StateDict | None, source: str) -> None:
    """Refuse to go on in the middle of a loader that the run does not have.

    Raises:
        ValueError: with those that it has.
    """
    if within is not None and within["key"] not in runner.loaders:
        raise ValueError(
            f"{source} was saved within loader {within['key']!r}; the run has the loaders {sorted(runner.loaders)}: "
            "call it as before, or go on from an epoch's end"
        )


def check_model_keys(saved: Mapping[str, Any], models: Mapping[str, Any], source: str) -> None:
    """Refuse several models for one, one for several, or others.

    Args:
        saved, models: by key; a lone one has the key "".
    Raises:
        ValueError: with the keys of both.
    """
    if "" in models and saved[""] and all(isinstance(each, Mapping) for each in saved[""].values()):
        raise ValueError(f"{source} holds the models {_quoted(saved[''])}, the runner has one")
    if set(saved) != set(models):
        are_models = all(isinstance(each, Mapping) for each in saved.values())
        held = f"the models {_quoted(saved)}" if are_models else "the weights of one model"
        raise ValueError(f"{source} holds {held}, the runner has the models {_quoted(models)}")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def check_weights(saved: Mapping[str, Any], own: Mapping[str, Any], source: str) -> None:
    """Tell which parameters and buffers make `saved` another model's than `own`, if any do.

    Raises:
        ValueError: with their names.
    """
    shapes = {name: (_shape(saved[name]), _shape(own[name])) for name in own if name in saved}
    kinds = {
        "missing in it": [name for name in own if name not in saved],
        "not in the model": [name for name in saved if name not in own],
        "of another shape": [f"{name} {a} instead of {b}" for name, (a, b) in shapes.items() if a != b],
    }
    told = [f"{len(names)} {kind}: {listed(names, _NUM_NAMED)}" for kind, names in kinds.items() if names]
    if told:
        raise ValueError(f"{source} holds another model's weights; {'; '.join(told)}")


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def check_optimizer(saved: StateDict, optimizer: Any, source: str) -> None:
    """Refuse the state of another kind of optimizer, which would be taken and fail in a step, or of other groups.

    Raises:
        ValueError: with what makes the difference.
    """
    if not isinstance(optimizer, Optimizer):
        return  # the user's own has its own words
    groups = saved["param_groups"]
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{source} holds an optimizer of {sizes[0]} parameters in its groups, the run's has {sizes[1]}"
        )
    # A newer torch has more options and a scheduler adds some, but either leaves the others' options there.
    missing = sorted(set(optimizer.defaults) - set(groups[0]))
    unknown = sorted(set(groups[0]) - set(optimizer.param_groups[0]))
    if missing and unknown:
        raise ValueError(
            f"{source} holds another kind of optimizer than the run's {type(optimizer).__name__}: one with {unknown}, "
            f"without {missing}"
        )


def settings_of(runner: IRunner) -> dict[str, Any]:
    """Collect by name what a run was set up with and may be changed between two starts; plain values."""
    return dict(_settings(runner))


def _settings(runner: IRunner) -> Iterator[tuple[str, Any]]:
    yield from flat(plain(redacted(runner.hparams)), "hparams")
    yield "seed", runner.seed
    yield "valid_every_steps", runner.valid_every_steps
    yield "precision", type(runner.engine.precision).__name__
    if runner.engine.device.type == "cpu":
        # It decides how sums are rounded. Named by the processes, of which another number is warned of elsewhere.
        name = f"torch.get_num_threads() in {runner.engine.num_processes} process(es)"
        yield name, torch.get_num_threads()
    for key, loader in runner.loaders.items():
        yield f"batch_size of {key}", plain(getattr(loader, "batch_size", None))
    for name, scheduler in _schedulers(runner):
        yield name, None if scheduler is None else type(scheduler).__name__
        yield from ((f"{name}.{key}", plain(value)) for key, value in _arguments(scheduler).items())
    for key, optimizer in as_dict(runner.optimizer).items():
        name = f"optimizer {key}".strip()
        yield name, type(optimizer).__name__
        # As it was made: of the groups' options some change while the run goes on.
        yield from flat(plain(getattr(optimizer, "defaults", {})), name)


def _schedulers(runner: IRunner) -> Iterator[tuple[str, Any]]:
    """Yield schedulers by name, and behind each those inside it."""
    found = [(f"scheduler {key}".strip(), each) for key, each in as_dict(runner.scheduler).items()]
    while found:
        name, scheduler = found.pop(0)
        yield name, scheduler
        if isinstance(scheduler, WarmupLR):
            inner = {"after": scheduler.after}
        else:  # torch's SequentialLR and ChainedScheduler
            inner = {str(place): each for place, each in enumerate(getattr(scheduler, "_schedulers", ()))}
        found = [(f"{name}.{key}", each) for key, each in inner.items()] + found


def _arguments(scheduler: Any) -> dict[str, Any]:
    """Read back what a scheduler was made with, as far as it keeps that under the arguments' names."""
    if not isinstance(scheduler, LRScheduler | WarmupLR):
        return {}  # the user's own may change such an attribute with each step
    names = inspect.signature(type(scheduler)).parameters.keys() - {"optimizer", "last_epoch", "after", "schedulers"}
    return {key.lstrip("_"): value for key, value in vars(scheduler).items() if key.lstrip("_") in names}


def warn_of_changes(
    saved: Mapping[str, Any], passed: Mapping[str, Any], now: Mapping[str, Any], source: str, *, takes_passed: bool
) -> None:
    """Name each setting that differs, and which value of the two applies.

    What only one of the two knows is told of for hyperparameters; other settings come and go with versions.

    Args:
        saved, passed: of the checkpoint, and of the run before it took the checkpoint's state.
        now: of the run with that state.
        takes_passed: whether the optimizers' options are those that were passed.
    """
    names = [*passed, *(name for name in saved if name not in passed)]
    known = [name for name in names if name.startswith("hparams.") or (name in saved and name in passed)]
    own, taken, logged = [], [], []
    for name in known:
        before, given, applied = _told(saved, name), _told(passed, name), _told(now, name)
        if name.startswith("optimizer") and "." in name and not takes_passed:
            applied = before  # its groups are the checkpoint's, its defaults are not
        if applied != given:
            taken.append(f"{name} is {applied}, {given} was passed")
        elif before != given and name.startswith("hparams."):  # a record: what it was used for is told by itself
            logged.append(f"{name} was {before}, is {given}")
        elif before != given:
            own.append(f"{name} was {before}, is {given}")
    kinds = (
        ("with the new ones", own),
        ("with the checkpoint's (resume_options='arguments' takes those that are passed)", taken),
        ("logging the new hyperparameters", logged),
    )
    parts = [f"{what}: {listed(changes, 10 * _NUM_NAMED)}" for what, changes in kinds if changes]
    if parts:
        logger.warning("%s was saved with other settings, and the run goes on %s", source, "; and ".join(parts))


def check_one_cycle(runner: IRunner, passed: Mapping[str, Any], source: str) -> None:
    """Refuse to train beyond the end of a one-cycle schedule, where torch raises in the middle of an epoch.

    Args:
        passed: the settings of the run before it took the checkpoint's state.
    Raises:
        ValueError: with the steps of both.
    """
    has_epoch_left = runner.stage_epoch_step < runner.stage_epoch_len
    for name, scheduler in _schedulers(runner):
        if not isinstance(scheduler, OneCycleLR):
            continue
        total, wanted = scheduler.total_steps, passed[f"{name}.total_steps"]
        if has_epoch_left and (wanted > total or scheduler.last_epoch >= total):
            left = f"epochs {runner.stage_epoch_step + 1} to {runner.stage_epoch_len} are left"
            raise ValueError(
                f"{source} has made {scheduler.last_epoch} of the {total} steps of its one-cycle schedule, which "
                f"cannot be made longer: {name}.total_steps is {total}, {wanted} was passed, and {left}. Train to the "
                "end of that cycle as it was, or begin a new one with its weights: runner.load(...), then train "
                'without resume; resume_options="arguments" goes on in the cycle that was passed'
            )


def _told(settings: Mapping[str, Any], name: str) -> str:
    return _ADDRESS.sub("", repr(settings[name])) if name in settings else "absent"
