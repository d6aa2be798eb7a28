"""All state of a run: taken for a checkpoint, found again, and put back; between epochs or within one."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runnerkit import resume_check, resume_options
from runnerkit.callback import (
    ICallback,
    ICheckpointCallback,
    IStoppingCallback,
    IWeightAverageCallback,
    innermost,
)
from runnerkit.logger import Step
from runnerkit.sampling.sharding import count_batches, share_of
from runnerkit.seeding import rng_state, set_rng_state
from runnerkit.storage.checkpoint import find_checkpoint, holds_checkpoint
from runnerkit.storage.checkpoint_file import load_checkpoint
from runnerkit.storage.plain_state import as_plain
from runnerkit.storage.weights import under_names_of, without_compiled
from runnerkit.types import StateDict, as_dict
from runnerkit.version import __version__

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

_COUNTERS = (
    "epoch_step", "batch_step", "sample_step", "stage_epoch_step", "stage_batch_step", "stage_sample_step",
    "epoch_metrics", "experiment_metrics",
)  # fmt: skip


@dataclass
class Snapshot:
    """A run's state on its way back into a runner."""

    state: StateDict
    source: str
    is_restored: bool = False
    within: StateDict | None = None  # where in a loader the run goes on; None is at an epoch's start
    rng: StateDict | None = None  # to be set once that loader's iterator is made

    @property
    def step(self) -> Step:
        """The last step that the snapshot knows of."""
        counters = self.state["counters"]
        within = self.state["within"] or {}
        return Step(self.state["stage_key"], within.get("key", ""), counters["epoch_step"], counters["batch_step"])

    @property
    def place(self) -> tuple[int, float]:
        """Epoch, and step within it; infinite at its end."""
        step = self.step
        return step.epoch, step.batch if self.state["within"] is not None else math.inf


def model_state(runner: IRunner, *, whole: bool = True) -> StateDict:
    """Take the weights of the user's module, or of each by key; every rank must call.

    Raises:
        TypeError: a module's extra state is nothing that a checkpoint can hold.
    """
    states = {
        key: as_plain(
            without_compiled(runner.engine.model_state_dict(model, whole=whole)),
            f"model_state_dict[{key!r}]" if key else "model_state_dict",
        )
        for key, model in _models(runner).items()
    }
    return states if isinstance(runner.model, dict) else states[""]


def judged_state(runner: IRunner, trained: StateDict) -> StateDict:
    """Return the weights that evaluation sees: averages if a callback keeps them, else the `trained` ones."""
    judged = [each.judged_weights() for each in _innermost(runner) if isinstance(each, IWeightAverageCallback)]
    by_key = {key: without_compiled(state) for each in judged for key, state in each.items()}
    if not by_key:
        return trained
    return {**trained, **by_key} if isinstance(runner.model, dict) else by_key[""]


def _innermost(runner: IRunner) -> Iterator[ICallback]:
    return map(innermost, runner.callbacks.values())


def _models(runner: IRunner) -> dict[str, nn.Module]:
    # As the engine prepared them, if it did: only so can it tell whose part is where.
    return as_dict(runner._training_model if runner._training_model is not None else runner.model)


def capture(runner: IRunner) -> StateDict:
    """Take all state, or this process's part of it; every rank must call: this gathers the generators' states.

    Raises:
        TypeError: it holds something that a checkpoint cannot, such as a deque of a callback; its place is named.
    """
    engine, whole = runner.engine, not runner.engine.sharded_checkpoints
    trained = model_state(runner, whole=whole)
    judged = judged_state(runner, trained)  # whoever loads weights is to get what the metrics were of
    # Here, where each rank that has the fault raises it at the first save, and in no thread.
    rest = as_plain({
        "format_version": resume_check.FORMAT_VERSION,
        "runnerkit_version": __version__,
        "settings": resume_check.settings_of(runner),
        "stage_key": runner.stage_key,
        "counters": {name: getattr(runner, name) for name in _COUNTERS} | _early_stop(runner),
        "stopped_by": _stoppers(runner),
        "within": _position(runner) if runner.is_within_loader else None,
        "criterion_state_dict": _states(runner.criterion),
        "optimizer_state_dict": {
            key: engine.optimizer_state_dict(each, whole=whole) for key, each in as_dict(runner.optimizer).items()
        },
        "scheduler_state_dict": _states(runner.scheduler),
        "engine_state_dict": engine.state_dict(),
        "callbacks": {key: callback.state_dict() for key, callback in runner.callbacks.items()},
        "rng": engine.gather_object(rng_state()),
    })  # fmt: skip
    averaged = {"trained_model_state_dict": trained} if judged is not trained else {}
    return {**rest, "model_state_dict": judged, **averaged}


def _early_stop(runner: IRunner) -> StateDict:
    # Within a loader it ends that loader only, and a resumed run must not take it for the stage's end.
    return {"need_early_stop": runner.need_early_stop and not runner.is_within_loader}


def _stoppers(runner: IRunner) -> list[str]:
    """List the keys of callbacks that hold the stage to be over."""
    found = {key: innermost(callback) for key, callback in runner.callbacks.items()}
    return [key for key, callback in found.items() if isinstance(callback, IStoppingCallback) and callback.has_stopped]


def _states(components: Any) -> StateDict:
    return {key: each.state_dict() for key, each in as_dict(components).items() if hasattr(each, "state_dict")}


def check_positions(runner: IRunner, *, reason: str) -> None:
    """Refuse training loaders whose position within an epoch cannot be saved.

    Args:
        reason: the argument because of which it would be.
    Raises:
        TypeError: with the loader's key.
    """
    for key, loader in runner.loaders.items():
        if key.startswith("train") and not has_position(loader):
            raise TypeError(
                f"loader {key!r} has no position to save in the middle of an epoch; leave out {reason} to save at the "
                "ends of epochs, or use a DataLoader whose sampler has a length and is not a DistributedSampler"
            )


def has_position(loader: Any) -> bool:
    """Return whether a place within an epoch of `loader` can be saved and found again."""
    return share_of(loader) is not None


def _position(runner: IRunner) -> StateDict:
    return {
        "key": runner.loader_key,
        "position": share_of(runner.loader).position_after(runner.loader_batch_step - runner._skipped_batches),
        "loader_batch_step": runner.loader_batch_step,
        "loader_sample_step": runner.loader_sample_step,
        "means": runner.engine.gather_object(runner._means.state_dict()),
    }


def find(runner: IRunner, stage: str) -> bool:
    """Look once for the checkpoint that the user wants to go on from; False if it belongs to a later stage."""
    if runner._snapshot is None and not runner._is_open:
        given = [each.resume_runner for each in _innermost(runner) if isinstance(each, ICheckpointCallback)]
        if runner._resume is not None or any(given):
            from runnerkit.state_broadcast import broadcast_state  # late, as what few runs need

            # Every rank must enter. Rank zero decides and reads for all: it alone is sure to see the files.
            found = _sought(runner, given) if runner.engine.is_main_process else (None, False)
            runner._snapshot, runner._continues = broadcast_state(found, runner.engine)
    snapshot = runner._snapshot
    return snapshot is None or snapshot.is_restored or snapshot.state["stage_key"] == stage


def _sought(runner: IRunner, given: list[str | None]) -> tuple[Snapshot | None, bool]:
    """Return the state to go on from, if there is one, and whether what the logdir holds is this run's own."""
    if runner._resume is not None and (not runner._resumes_if_found or holds_checkpoint(Path(runner._resume))):
        return _load(runner._resume, runner), runner._continues
    source = next((each for each in given if each), None)
    return (None, runner._continues) if source is None else (_load(source, runner), True)


def _load(source: str | Path, runner: IRunner) -> Snapshot:
    path = find_checkpoint(source)
    state = load_checkpoint(path, whole=not runner.engine.sharded_checkpoints)
    resume_check.check_format(state, path)
    resume_check.check_place(runner, state, path)
    return Snapshot(state, str(path))


def restore(runner: IRunner) -> None:
    """Put the found state back, once, into components that are made and callbacks that are started."""
    snapshot = runner._snapshot
    if snapshot is None or snapshot.is_restored:
        return
    state = snapshot.state
    resume_check.check_loader(runner, state["within"], snapshot.source)
    passed = resume_check.settings_of(runner)
    if "shards" in state:
        state = runner.engine.load_shards(state, Path(snapshot.source))  # every rank must enter, and see the files
    # Where evaluation sees averages of the weights, those that are trained stand beside them.
    trained = "trained_model_state_dict" if "trained_model_state_dict" in state else "model_state_dict"
    load_model_state(runner, state[trained], source=snapshot.source)
    takes_passed = runner.resume_options == "arguments"
    for key, optimizer in as_dict(runner.optimizer).items():
        if key in state["optimizer_state_dict"]:
            resume_check.check_optimizer(state["optimizer_state_dict"][key], optimizer, snapshot.source)
            options = resume_options.options_of(optimizer)
            runner.engine.load_optimizer_state_dict(optimizer, state["optimizer_state_dict"][key])
            if takes_passed:
                resume_options.put_options(optimizer, options)
    for name in ("criterion", "scheduler"):
        saved = state[f"{name}_state_dict"]
        for key, component in as_dict(getattr(runner, name)).items():
            if key in saved and name == "scheduler" and takes_passed:
                resume_options.advance(component, saved[key])
            elif key in saved:
                component.load_state_dict(saved[key])
    runner.engine.load_state_dict(state["engine_state_dict"])
    for key, callback in runner.callbacks.items():
        if key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][key])
    ownerless = sorted(key for key in state["callbacks"].keys() - runner.callbacks.keys() if state["callbacks"][key])
    if ownerless:
        logger.warning(
            "%s holds the state of callbacks that the run does not have: %s; it has %s (in a dict they have keys that "
            "do not depend on their order)", snapshot.source, ownerless, sorted(runner.callbacks),
        )  # fmt: skip
    if "settings" in state and runner.engine.is_main_process:
        now = resume_check.settings_of(runner)
        resume_check.warn_of_changes(state["settings"], passed, now, snapshot.source, takes_passed=takes_passed)
    vars(runner).update(state["counters"])
    resume_check.check_one_cycle(runner, passed, snapshot.source)
    runner.need_early_stop = _stops_again(runner, state)
    snapshot.within = state["within"]
    rng = state["rng"]
    if len(rng) == runner.engine.num_processes:
        snapshot.rng = rng[runner.engine.rank]
    else:
        logger.warning(
            "%s was saved by %d processes: dropout differs, and augmentation on the device", snapshot.source, len(rng)
        )
    if snapshot.within is None:
        restore_rng(runner)
    snapshot.state = {name: state[name] for name in ("stage_key", "counters", "within", "rng")}  # not the weights
    snapshot.is_restored = True
    logger.info("resumed from %s at %s", snapshot.source, snapshot.step)
    is_last = runner.stage_key == [*runner.stages][-1]
    if is_last and not is_epoch_left(runner) and not runner.need_early_stop and runner.engine.is_main_process:
        # A warning, since these alone are seen without logging.basicConfig(), and a run that does nothing looks broken.
        done, wanted = runner.stage_epoch_step, runner.stage_epoch_len
        logger.warning("%d of %d epochs are done; raise num_epochs to go on", done, wanted)


def _stops_again(runner: IRunner, state: StateDict) -> bool:
    """Whether a stage that had been ended early is over: what ended it may be gone, or have another patience by now."""
    if not runner.need_early_stop:
        return False
    by = state.get("stopped_by", [])  # none: by a callback that tells nothing, whose word stays
    stops = not by or not set(by).isdisjoint(_stoppers(runner))
    if runner.engine.is_main_process:
        who = f" by {', '.join(map(repr, by))}" if by else ""
        ways = "raise the patience, take that callback away, or " if by else ""
        left = f"nothing is left to do in it; to train on, {ways}resume from an earlier checkpoint"
        logger.warning(
            "stage %r had been stopped early%s after epoch %d: %s", runner.stage_key, who, runner.epoch_step,
            left if stops else "that does not hold any more, and it goes on",
        )  # fmt: skip
    return stops


def leave_branch(runner: IRunner) -> None:
    """Let what was saved after the checkpoint that the run goes on from not count any more.

    Rank zero calls before the logs are cut: after that the newest checkpoint must be of the branch that they are of.
    """
    if runner._snapshot is not None:
        source, place = Path(runner._snapshot.source), runner._snapshot.place
        for callback in _innermost(runner):
            if isinstance(callback, ICheckpointCallback):
                callback.leave_branch(source, stage=runner.stage_key, place=place)


def load_model_state(runner: IRunner, state: StateDict, *, source: str) -> None:
    """Load weights into the user's module, or into each by key.

    Raises:
        ValueError: they are another model's.
    """
    by_key = state if isinstance(runner.model, dict) else {"": state}
    models = _models(runner)
    resume_check.check_model_keys(by_key, models, source)
    for key, model in models.items():
        module = runner.engine.unwrap(model)
        named = under_names_of(module, by_key[key])
        try:
            runner.engine.load_model_state_dict(model, named)
        except RuntimeError as error:
            resume_check.check_weights(named, module.state_dict(), source)
            raise ValueError(f"{source} holds another model's weights: {error}") from error


def is_within_epoch(runner: IRunner) -> bool:
    """Whether the run is about to go on in the middle of an epoch."""
    return runner._snapshot is not None and runner._snapshot.within is not None


def is_epoch_left(runner: IRunner) -> bool:
    """Whether the stage has an epoch to begin, or one to finish."""
    return runner.stage_epoch_step < runner.stage_epoch_len or is_within_epoch(runner)


def start_epoch(runner: IRunner) -> None:
    """Count a new epoch, unless the run goes on within the one that was interrupted."""
    if not is_within_epoch(runner):
        runner.epoch_step += 1
        runner.stage_epoch_step += 1
        runner.epoch_metrics = {}


def loaders_left(runner: IRunner) -> list[str]:
    """List the epoch's loaders, from the interrupted one on if there is one."""
    keys = list(runner.loaders)
    if runner._snapshot is None or runner._snapshot.within is None:
        return keys
    return keys[keys.index(runner._snapshot.within["key"]) :]


def enter_loader(runner: IRunner) -> None:
    """Go to where the loader was interrupted, if it was."""
    snapshot = runner._snapshot
    runner._skipped_batches = 0
    if snapshot is None or snapshot.within is None:
        return
    within, snapshot.within = snapshot.within, None
    share_of(runner.loader).skip(within["position"])
    if runner.is_train_loader:
        _check_rest(runner, num_before=len(snapshot.state["rng"]), num_done=within["loader_batch_step"])
    runner.loader_batch_step = runner._skipped_batches = within["loader_batch_step"]
    runner.loader_sample_step = within["loader_sample_step"]
    # Sums add up over ranks: with fewer processes than before, one takes over the parts of several.
    parts = within["means"][runner.engine.rank :: runner.engine.num_processes]
    runner._means.load_state_dicts(parts, device=runner.engine.device)


def _check_rest(runner: IRunner, *, num_before: int, num_done: int) -> None:
    # Every rank must call: this gathers. Too few samples for all would leave some in a step that the others skip.
    num_left = runner.engine.gather_object(count_batches(runner.loader))
    if len(set(num_left)) > 1:
        raise ValueError(
            f"loader {runner.loader_key!r} was interrupted after batch {num_done} and has fewer samples left than the "
            f"{runner.engine.num_processes} processes that are to train on them: {num_left} batches on the ranks; "
            f"resume with {num_before} as before, or from an epoch's start"
        )


def restore_rng(runner: IRunner) -> None:
    """Set the generators as they were."""
    if runner._snapshot is None or runner._snapshot.rng is None:
        return
    rng, runner._snapshot.rng = runner._snapshot.rng, None
    set_rng_state(rng)
    num_before, num_now = len(rng["cuda"]), torch.cuda.device_count()
    if num_before != num_now and runner.engine.device.type == "cuda" and runner.engine.is_main_process:
        logger.warning(
            "%s was saved where a process saw %d GPUs, and %d are visible now: the generators of the first %d are "
            "restored, others draw other numbers (dropout, augmentation on the device); set CUDA_VISIBLE_DEVICES as it "
            "was to resume exactly", runner._snapshot.source, num_before, num_now, min(num_before, num_now),
        )  # fmt: skip
