"""Checks that a checkpoint is compatible with this run: errors if it cannot be resumed, warnings if settings differ.

Another model, another kind of optimizer, an unknown format or stage is an error. A changed setting (a hyperparameter,
the seed) only changes the rest of the run, which may be what the user wants.
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

from runnerkit.checkpoints.weights import listed
from runnerkit.sampling.loader_members import LoaderMembers
from runnerkit.sampling.orders import check_order
from runnerkit.sampling.sharding import share_of
from runnerkit.support.component_members import OptimizerMembers
from runnerkit.support.plain_values import flat, plain
from runnerkit.support.redaction import redacted
from runnerkit.support.torch_internals import inner_schedulers
from runnerkit.types import StateDict, as_dict
from runnerkit.version import __version__
from runnerkit.warmup import WarmupLR

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1  # written by this version, which reads all formats from OLDEST_FORMAT on
OLDEST_FORMAT = 1
_NUM_NAMED = 5  # parameters listed per kind of mismatch; ten times as many settings
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the repr of an object; differs between processes


def check_format(state: Any, path: Path) -> None:
    """Raise unless `state` is the state of a run in a format that this version reads.

    Raises:
        ValueError: with the versions.
    """
    if not isinstance(state, dict) or "format_version" not in state:
        raise ValueError(f"{path} does not hold a whole run; to start from its weights, load them into the model")
    version, writer = state["format_version"], state.get("runnerkit_version", "of an unknown version")
    if not isinstance(version, int) or not OLDEST_FORMAT <= version <= FORMAT_VERSION:
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        raise ValueError(
            f"{path} has format {version!r}, written by runnerkit {writer}; this is runnerkit {__version__}, which "
            f"reads {OLDEST_FORMAT} to {FORMAT_VERSION}: "
            + ("upgrade it" if is_newer else "resume with the version that wrote it, or load only its weights")
        )


def check_place(state: StateDict, path: Path, *, stages: list[str]) -> None:
    """Raise if the checkpoint belongs to a stage that is not one of the runner's `stages`.

    Raises:
        ValueError: with the runner's stages.
    """
    if state["stage_key"] not in stages:
        raise ValueError(f"{path} is of stage {state['stage_key']!r}; the runner has the stages {stages}")


def check_loader(within: StateDict | None, loaders: Mapping[str, Any], source: str) -> None:
    """Raise if the checkpoint was saved within a loader that the run does not have.

    Raises:
        ValueError: with the run's loaders.
    """
    if within is not None and within["key"] not in loaders:
        raise ValueError(
            f"{source} was saved within loader {within['key']!r}; the run has the loaders {sorted(loaders)}: "
            "name it as before, or resume from the end of an epoch"
        )


def check_orders(state: StateDict, loaders: Mapping[str, Any], source: str) -> None:
    """Raise if a loader would continue in the middle of another order than that of the interrupted pass.

    Raises:
        ValueError: with both lengths and orders.
    """
    within = state["within"]
    if within is not None:
        check_order(within["key"], within.get("order"), share_of(loaders[within["key"]]).described(), source)
    for key, position in state.get("streams", {}).items():
        share, saved = share_of(loaders.get(key)), state.get("stream_orders", {}).get(key)
        now = share.described()
        if not share.continues or position["pass"] == 0 or saved is None or now is None:
            continue  # absent before 0.2
        if isinstance(position["within"], int) and position["within"] >= saved["length"]:
            position["within"] = now["length"]  # the end of the pass, in the new order
        else:
            check_order(key, saved, now, source)


def check_model_keys(saved: Mapping[str, Any], models: Mapping[str, Any], source: str) -> None:
    """Raise unless the checkpoint has the same models as the runner.

    Args:
        saved, models: by key; a single model has the key "".
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
    """Raise if parameters and buffers in `saved` do not match those in `own`.

    Raises:
        ValueError: with their names.
    """
    shapes = {name: (_shape(saved[name]), _shape(own[name])) for name in own if name in saved}
    kinds = {
        "missing from it": [name for name in own if name not in saved],
        "not in the model": [name for name in saved if name not in own],
        "of another shape": [f"{name} {a} instead of {b}" for name, (a, b) in shapes.items() if a != b],
    }
    told = [f"{len(names)} {kind}: {listed(names, _NUM_NAMED)}" for kind, names in kinds.items() if names]
    if told:
        raise ValueError(f"{source} holds another model's weights; {'; '.join(told)}")


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def check_optimizer_state(saved: StateDict, optimizer: Any, source: str, *, was: str | None) -> None:
    """Raise if the state is of another kind of optimizer, which would load and step wrongly, or has other groups.

    Args:
        was: name of the class of the saved one; None if it is unknown.
    Raises:
        ValueError: with the differences.
    """
    if was is not None and was != type(optimizer).__name__:
        raise ValueError(
            f"{source} holds the state of {was}, the run has {type(optimizer).__name__}, and neither can continue from "
            "the other's (resume_options='arguments' changes the options of the same optimizer only): resume with "
            f"{was}, or start a new run from the weights: runner.load(logdir, which='last')"
        )
    if not isinstance(optimizer, Optimizer):
        return  # a custom optimizer raises its own error
    groups = saved["param_groups"]
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{source} holds an optimizer with {sizes[0]} parameters in its groups, the run's has {sizes[1]}"
        )
    # A newer torch has more options and a scheduler adds some, but neither removes any.
    missing = sorted(set(optimizer.defaults) - set(groups[0]))
    unknown = sorted(set(groups[0]) - set(optimizer.param_groups[0]))
    if missing and unknown:
        raise ValueError(
            f"{source} holds a different kind of optimizer from the run's {type(optimizer).__name__}: it has {unknown} "
            f"and lacks {missing}"
        )


def step_settings(runner: IRunner) -> dict[str, Any]:
    """Return the arguments of `train` that change the steps of a run."""
    return {
        "valid_every_steps": runner.valid_every_steps,
        "epoch_steps": runner.epoch_steps,
        "accumulation_steps": runner.accumulation_steps,
        "gradient_clip": runner.gradient_clip,
        "loss_reduction": runner.loss_reduction,
    }


def resume_settings(runner: IRunner) -> dict[str, Any]:
    """Collect by name the settings of a run that may change between two starts, as plain values."""
    settings: dict[str, Any] = dict(flat(plain(redacted(runner.hparams)), "hparams"))
    settings |= {"seed": runner.seed, **step_settings(runner), "scheduler_interval": runner.scheduler_interval}
    settings["precision"] = type(runner.engine.precision).__name__
    if runner.engine.device.type == "cpu":
        # It affects the rounding of sums. The name has the number of processes, a change of which warns elsewhere.
        name = f"torch.get_num_threads() in {runner.engine.num_processes} process(es)"
        settings[name] = torch.get_num_threads()
    for key, loader in runner.loaders.items():
        settings[f"batch_size of {key}"] = plain(LoaderMembers(loader).batch_size)
    for name, scheduler in _by_name(runner.scheduler):
        settings[name] = None if scheduler is None else type(scheduler).__name__
        settings |= {f"{name}.{key}": plain(value) for key, value in _arguments(scheduler).items()}
    for key, optimizer in as_dict(runner.optimizer).items():
        name = f"optimizer {key}".strip()
        settings[name] = type(optimizer).__name__
        # The defaults, because some options of the groups change during the run.
        settings |= flat(plain(OptimizerMembers(optimizer).defaults), name)
    return settings


def _by_name(schedulers: Any) -> Iterator[tuple[str, Any]]:
    """Yield schedulers by name, each followed by those inside it."""
    found = [(f"scheduler {key}".strip(), each) for key, each in as_dict(schedulers).items()]
    while found:
        name, scheduler = found.pop(0)
        yield name, scheduler
        if isinstance(scheduler, WarmupLR):
            inner = {"after": scheduler.after}
        else:  # torch's SequentialLR and ChainedScheduler
            inner = {str(place): each for place, each in enumerate(inner_schedulers(scheduler))}
        found = [(f"{name}.{key}", each) for key, each in inner.items()] + found


def _arguments(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's arguments that it keeps in attributes with their names."""
    if not isinstance(scheduler, LRScheduler | WarmupLR):
        return {}  # a custom scheduler may change such an attribute at each step
    names = inspect.signature(type(scheduler)).parameters.keys() - {"optimizer", "last_epoch", "after", "schedulers"}
    if isinstance(scheduler, OneCycleLR):
        names |= {"total_steps"}  # which check_one_cycle reads; a subclass may have other arguments
    return {key.lstrip("_"): value for key, value in vars(scheduler).items() if key.lstrip("_") in names}


def warn_of_changes(
    saved: Mapping[str, Any], passed: Mapping[str, Any], now: Mapping[str, Any], source: str, *, takes_passed: bool
) -> None:
    """Warn about each setting that differs, with the value that applies.

    A setting that exists on one side only is reported if it is a hyperparameter; others come and go with versions.

    Args:
        saved, passed: settings of the checkpoint, and of the run before it loaded the checkpoint.
        now: settings of the run after it loaded the checkpoint.
        takes_passed: whether the optimizers keep the options that were passed.
    """
    names = [*passed, *(name for name in saved if name not in passed)]
    known = [name for name in names if name.startswith("hparams.") or (name in saved and name in passed)]
    own, taken, logged = [], [], []
    for name in known:
        before, given, applied = _describe(saved, name), _describe(passed, name), _describe(now, name)
        if name.startswith("optimizer") and "." in name and not takes_passed:
            applied = before  # its groups come from the checkpoint, its defaults do not
        if applied != given:
            taken.append(f"{name} is {applied}, {given} was passed")
        elif before != given and name.startswith("hparams."):  # a record: settings made from it are reported separately
            logged.append(f"{name} was {before}, is {given}")
        elif before != given:
            own.append(f"{name} was {before}, is {given}")
    kinds = (
        ("with the new ones", own),
        ("with the checkpoint's (resume_options='arguments' uses the ones that were passed)", taken),
        ("logging the new hyperparameters", logged),
    )
    parts = [f"{what}: {listed(changes, 10 * _NUM_NAMED)}" for what, changes in kinds if changes]
    if parts:
        logger.warning("%s was saved with other settings; the run continues %s", source, "; and ".join(parts))


def check_one_cycle(
    schedulers: Any, passed: Mapping[str, Any], source: str, *, next_epoch: int, num_epochs: int | None
) -> None:
    """Raise if training would exceed a one-cycle schedule, at whose end torch raises in the middle of an epoch.

    Args:
        passed: the settings of the run before it loaded the checkpoint.
        next_epoch, num_epochs: of the stage, which has an epoch left.
    Raises:
        ValueError: with the steps of both.
    """
    for name, scheduler in _by_name(schedulers):
        if not isinstance(scheduler, OneCycleLR):
            continue
        total, wanted = scheduler.total_steps, passed[f"{name}.total_steps"]
        if wanted > total or scheduler.last_epoch >= total:
            left = f"epochs {next_epoch} to {'the last' if num_epochs is None else num_epochs} are left"
            raise ValueError(
                f"{source} has taken {scheduler.last_epoch} of the {total} steps of its one-cycle schedule, which "
                f"cannot be extended: {name}.total_steps is {total}, {wanted} was passed, and {left}. Train to the "
                "end of the original cycle, or start a new one with its weights: runner.load(...), then train "
                'without resume; resume_options="arguments" continues in the cycle that was passed'
            )


def _describe(settings: Mapping[str, Any], name: str) -> str:
    return _ADDRESS.sub("", repr(settings[name])) if name in settings else "absent"
