"""The point where a run continues: the checkpoint is found, restored, and the interrupted loader is re-entered."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from runnerkit.callback import ICheckpointCallback, innermost
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.folder import find_checkpoint, holds_checkpoint
from runnerkit.logger import Step
from runnerkit.loop.hooks import call_hook
from runnerkit.resume import compatibility, matching, overrides
from runnerkit.resume.run_state import load_model_state, load_states_of_runner, models_of, stoppers
from runnerkit.sampling.sharding import count_batches, share_of
from runnerkit.seeding.generators import set_rng_state
from runnerkit.steps import budget
from runnerkit.storage.claims import bring
from runnerkit.storage.remote.urls import shown
from runnerkit.types import StateDict, as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


class Snapshot:
    """The state of an interrupted run, to be restored into a runner.

    Attributes:
        state: content of the checkpoint; after it was restored, without the tensors.
        source: path of the checkpoint.
        within: position in the interrupted loader; None at the start of an epoch.
        rng: generator states, to be set after that loader's iterator is made.
    """

    def __init__(self, state: StateDict, source: str) -> None:
        self.state, self.source = state, source
        self.is_restored = False
        self.within: StateDict | None = None
        self.rng: StateDict | None = None

    @property
    def step(self) -> Step:
        """The last step of the interrupted run."""
        counters = self.state["counters"]
        within = self.state["within"] or {}
        return Step(self.state["stage_key"], within.get("key", ""), counters["epoch_step"], counters["batch_step"])

    @property
    def place(self) -> tuple[int, float]:
        """Epoch, and step within it; infinite at its end."""
        step = self.step
        return step.epoch, step.batch if self.state["within"] is not None else math.inf


class ResumePoint:
    """The checkpoint that a run continues from, if there is one.

    Args:
        wanted: checkpoint or logdir; None starts from the beginning.
        may_be_missing: whether `wanted` may hold no checkpoint, as with ``resume="auto"``.
        continues_logs: whether the logs in the logdir belong to this run, even without a checkpoint.

    Attributes:
        found: the checkpoint's state, on all ranks.
    """

    is_shared_by_scratch_copies = True  # they belong to the same run

    def __init__(
        self, wanted: str | Path | None = None, *, may_be_missing: bool = False, continues_logs: bool = False
    ) -> None:
        self.wanted = wanted
        self.may_be_missing = may_be_missing
        self.wants_logs = self.continues_logs = continues_logs
        self.found: Snapshot | None = None

    def renewed(self) -> Self:
        """Return a point for another run of the same runner, without the checkpoint that this one found."""
        return type(self)(self.wanted, may_be_missing=self.may_be_missing, continues_logs=self.wants_logs)

    @property
    def is_found(self) -> bool:
        """True if a checkpoint was found."""
        return self.found is not None

    @property
    def source(self) -> Path | None:
        """Path of the checkpoint that was found."""
        return Path(self.found.source) if self.found is not None else None

    @property
    def is_used(self) -> bool:
        """True if a checkpoint was found, or the logs in the logdir belong to this run."""
        return self.is_found or self.continues_logs


def find(runner: IRunner, stage: str) -> bool:
    """Look once for the checkpoint to resume from; return False if it belongs to a later stage."""
    point = runner._resume_point
    if point.found is None and not runner._logs.is_open:
        given = [each.resume_runner for each in _checkpoint_callbacks(runner)]
        if point.wanted is not None or any(given):
            from runnerkit.resume.state_broadcast import broadcast_state  # late, as few runs need it

            # Every rank must enter. Rank zero decides and reads for all, as only it is sure to see the files.
            found = _sought(runner, given) if runner.engine.is_main_process else (None, False)
            if runner.engine.never_whole:
                point.found, point.continues_logs = _mapped_by_all(found, runner)
            else:
                point.found, point.continues_logs = broadcast_state(found, runner.engine)
    snapshot = runner._resume_point.found
    return snapshot is None or snapshot.is_restored or snapshot.state["stage_key"] == stage


def _mapped_by_all(found: tuple[Snapshot | None, bool], runner: IRunner) -> tuple[Snapshot | None, bool]:
    """Return what rank zero found, read by each process itself: only the parts that it uses."""
    snapshot, continues = found
    source = snapshot.source if snapshot else None
    source, url, continues = runner.engine.broadcast_object((source, shown(source or ""), continues))
    if source is None or snapshot is not None:
        return snapshot, continues
    path = bring(source, url)
    return Snapshot(load_checkpoint(path, whole=False, mapped=True), str(path)), continues


def _sought(runner: IRunner, given: list[str | None]) -> tuple[Snapshot | None, bool]:
    """Return the state to resume from, if there is one, and whether the logs in the logdir belong to this run."""
    point = runner._resume_point
    if point.wanted is not None and (not point.may_be_missing or holds_checkpoint(Path(point.wanted))):
        return _load(point.wanted, runner), point.continues_logs
    source = next((each for each in given if each), None)
    return (None, point.continues_logs) if source is None else (_load(source, runner), True)


def _load(source: str | Path, runner: IRunner) -> Snapshot:
    path = find_checkpoint(source)
    how = {"whole": not runner.engine.sharded_checkpoints, "mapped": runner.engine.never_whole}
    state = load_checkpoint(path, **how)
    compatibility.check_format(state, path)
    if _is_cut(runner, state):
        try:
            if not state["cut_at"]:
                raise ValueError("the position of its loader cannot be saved")
            before = path.parent / state["cut_at"]
            state, path = load_checkpoint(find_checkpoint(before), **how), before
        except (FileNotFoundError, ValueError) as error:
            logger.warning("the run ended within an epoch, and continues with the next one: %s", error)
    compatibility.check_place(runner, state, path)
    return Snapshot(state, str(path))


def _is_cut(runner: IRunner, state: StateDict) -> bool:
    """Return whether a limit ended the run within an epoch, and has been raised since."""
    if state.get("cut_at") is None:  # absent before 0.2
        return False
    limits = budget.budget_of(call_hook(runner._stage.hooks_of(runner).get_stage_len, stage=state["stage_key"]))
    counters = state["counters"]
    return not budget.is_reached(
        limits, num_steps=counters["stage_optimizer_step"], num_samples=counters["stage_sample_step"]
    )


def restore(runner: IRunner) -> None:
    """Restore the state, once, into components that exist and callbacks that have started."""
    snapshot = runner._resume_point.found
    if snapshot is None or snapshot.is_restored:
        return
    state = snapshot.state
    compatibility.check_loader(runner, state["within"], snapshot.source)
    compatibility.check_orders(runner, state, snapshot.source)
    passed = compatibility.settings_of(runner)
    if "shards" in state:
        # Every rank must enter: rank zero broadcasts the place, and each reads what it needs.
        path = bring(*runner.engine.broadcast_object((snapshot.source, shown(snapshot.source))))
        state = runner.engine.load_shards(state, path)
    _restore_components(runner, state, snapshot.source)
    for key, modes in runner._stage.training_modes.items():
        modes.load_state_dict(state.get("modes", {}).get(key, {}))  # absent before 0.2
    runner.engine.load_state_dict(state["engine_state_dict"])
    _restore_callbacks(runner, state["callbacks"], state.get("callback_identities", {}), snapshot.source)
    load_states_of_runner(runner, state.get("runner_states", [{}]), source=snapshot.source)  # absent before 0.2
    if "settings" in state and runner.engine.is_main_process:
        now, takes_passed = compatibility.settings_of(runner), _takes_passed(runner)
        compatibility.warn_of_changes(state["settings"], passed, now, snapshot.source, takes_passed=takes_passed)
    runner._loader_run.position.load_state_dict(runner, state["counters"])
    compatibility.check_one_cycle(runner, passed, snapshot.source)
    runner.need_early_stop = state["counters"]["need_early_stop"] and _stops_again(runner, state)
    snapshot.within = state["within"]
    for key, position in state.get("streams", {}).items():  # absent before 0.2
        if (share := share_of(runner.loaders.get(key))).continues:
            share.skip(position)
    rng = state["rng"]
    ranks = runner.engine.data_parallel
    if len(rng) == ranks.num_processes:
        snapshot.rng = rng[ranks.rank]
    else:
        logger.warning(
            "%s was saved by %d processes: dropout differs, and augmentation on the device", snapshot.source, len(rng)
        )
    if snapshot.within is None:
        restore_rng(runner)
    snapshot.state = {name: state[name] for name in ("stage_key", "counters", "within", "rng")}  # not the weights
    snapshot.is_restored = True
    logger.info("resumed from %s at %s", shown(snapshot.source), snapshot.step)
    is_last = runner.stage_key == [*runner.stages][-1]
    if is_last and not is_epoch_left(runner) and not runner.need_early_stop and runner.engine.is_main_process:
        # A warning, because it is shown without logging.basicConfig(); a run that does nothing looks broken.
        logger.warning("%s", budget.words_of_end(runner))


def _restore_components(runner: IRunner, state: StateDict, source: str) -> None:
    # If evaluation uses averaged weights, the trained ones are stored separately.
    trained = "trained_model_state_dict" if "trained_model_state_dict" in state else "model_state_dict"
    load_model_state(runner, state[trained], source=source)
    takes_passed = _takes_passed(runner)
    names, saved_names = matching.parameter_names(runner, models_of(runner)), state.get("optimizer_names", {})
    for key, optimizer in as_dict(runner.optimizer).items():
        if key in state["optimizer_state_dict"]:
            saved_state = state["optimizer_state_dict"][key]
            was = state.get("settings", {}).get(f"optimizer {key}".strip())  # absent before 0.2
            compatibility.check_optimizer_state(saved_state, optimizer, source, was=was)
            if key in saved_names:
                saved_state = matching.in_order(saved_state, saved_names[key], names[key], source)
            options = overrides.options_of(optimizer)
            runner.engine.load_optimizer_state_dict(optimizer, saved_state)
            if takes_passed:
                overrides.put_options(optimizer, options)
    for name in ("criterion", "scheduler"):
        saved = state[f"{name}_state_dict"]
        for key, component in as_dict(getattr(runner, name)).items():
            if key in saved and name == "scheduler" and takes_passed:
                overrides.advance(component, saved[key])
            elif key in saved:
                component.load_state_dict(saved[key])


def _takes_passed(runner: IRunner) -> bool:
    return runner.resume_options == "arguments"


def _restore_callbacks(
    runner: IRunner, states: Mapping[str, StateDict], identities: Mapping[str, list[str]], source: str
) -> None:
    found = matching.callback_states(runner.callbacks, states, identities)
    for key, state in found.items():
        runner.callbacks[key].load_state_dict(state)
    taken = {id(each) for each in found.values()}
    ownerless = sorted(key for key, each in states.items() if each and id(each) not in taken)
    if ownerless:
        theirs = [" ".join((key, *identities.get(key, ())[1:])) for key in ownerless]
        own = [" ".join((key, *matching.identity_of(each)[1:])) for key, each in sorted(runner.callbacks.items())]
        logger.warning(
            "%s holds the state of callbacks that the run does not have: %s; it has %s (in a dict they have keys that "
            "do not depend on their order)", source, theirs, own,
        )  # fmt: skip


def _stops_again(runner: IRunner, state: StateDict) -> bool:
    """Return whether a stage that was stopped early stays stopped: its callback may be gone or more patient now."""
    by = state.get("stopped_by", [])  # empty: stopped by a callback without a reason to check, so the stop stays
    stops = not by or not set(by).isdisjoint(stoppers(runner))
    if runner.engine.is_main_process:
        who = f" by {', '.join(map(repr, by))}" if by else ""
        ways = "raise the patience, remove that callback, or " if by else ""
        left = f"nothing is left to do in it; to train on, {ways}resume from an earlier checkpoint"
        logger.warning(
            "stage %r was stopped early%s after epoch %d: %s", runner.stage_key, who, runner.epoch_step,
            left if stops else "its condition no longer holds, so training continues",
        )  # fmt: skip
    return stops


def leave_branch(runner: IRunner) -> None:
    """Discard checkpoints saved after the one that the run continues from.

    Rank zero calls this before the logs are cut, so that the newest checkpoint always belongs to the same branch.
    """
    snapshot = runner._resume_point.found
    if snapshot is not None:
        source, place = Path(snapshot.source), snapshot.place
        for callback in _checkpoint_callbacks(runner):
            callback.leave_branch(source, stage=runner.stage_key, place=place)


def logged_step(runner: IRunner) -> Step | None:
    """Return the last step whose logs are kept, step 0 without a checkpoint; None if the run starts new logs."""
    snapshot = runner._resume_point.found
    if not runner._resume_point.continues_logs:
        return None
    if snapshot is None:
        return Step("", "", 0, 0)
    if snapshot.within is None:
        return snapshot.step
    # If they ran within the epoch, at this step, the evaluation loaders had ended.
    every = runner.valid_every_steps
    is_due = every is not None and runner.optimizer_step % every < runner.steps_per_batch
    is_validated = snapshot.within.get("is_validated", is_due)  # absent before 0.2
    return replace(snapshot.step, unended=frozenset([snapshot.step.loader] if is_validated else runner.loaders))


def is_within_epoch(runner: IRunner) -> bool:
    """Return whether the run is about to continue in the middle of an epoch."""
    snapshot = runner._resume_point.found
    return snapshot is not None and snapshot.within is not None


def is_epoch_left(runner: IRunner) -> bool:
    """Return whether the stage has an epoch to start or to finish."""
    return is_within_epoch(runner) or budget.is_epoch_left(runner)


def loaders_left(runner: IRunner) -> list[str]:
    """Return the keys of the epoch's loaders, starting with the interrupted one if there is one."""
    keys, snapshot = list(runner.loaders), runner._resume_point.found
    if snapshot is None or snapshot.within is None:
        return keys
    return keys[keys.index(snapshot.within["key"]) :]


def setup_position(runner: IRunner) -> int:
    """Move to the position where the loader was interrupted, if it was; return the number of batches skipped."""
    snapshot = runner._resume_point.found
    if snapshot is None or snapshot.within is None:
        return 0
    within, snapshot.within = snapshot.within, None
    share = share_of(runner.loader)
    if not share.has_position:
        raise TypeError(
            f"the run was interrupted within loader {runner.loader_key!r}, which does not have a position now: resume "
            "from a checkpoint of an epoch's end, or pass a DataLoader"
        )
    share.skip(within["position"])
    if runner.is_train_loader:
        _check_rest(runner, num_before=len(snapshot.state["rng"]), num_done=within["loader_batch_step"])
    runner.loader_batch_step = within["loader_batch_step"]
    runner.loader_sample_step = within["loader_sample_step"]
    runner.need_early_stop = within.get("is_ended", False)  # absent before 0.2, as is ends_stage
    run = runner._loader_run
    run.ends_stage = within.get("ends_stage", False)
    if within.get("is_validated", False):  # absent before 0.2
        run.position.note_validation(runner)
    # Sums add up over ranks: with fewer processes than before, a process takes over the sums of several.
    ranks = runner.engine.data_parallel
    parts = within["means"][ranks.rank :: ranks.num_processes]
    run.means.load_state_dicts(parts, device=runner.engine.device)
    return runner.loader_batch_step


def _check_rest(runner: IRunner, *, num_before: int, num_done: int) -> None:
    # Every rank must call: this gathers. With too few samples, some ranks would hang in a step that others skip.
    num_left = runner.engine.gather_object(count_batches(runner.loader))
    if len(set(num_left)) > 1:
        raise ValueError(
            f"loader {runner.loader_key!r} was interrupted after batch {num_done} and has fewer samples left than the "
            f"{runner.engine.num_processes} processes that are to train on them: {num_left} batches on the ranks; "
            f"resume with {num_before} as before, or from an epoch's start"
        )


def restore_rng(runner: IRunner) -> None:
    """Set the generators to the interrupted run's states, once."""
    snapshot = runner._resume_point.found
    if snapshot is None or snapshot.rng is None:
        return
    rng, snapshot.rng = snapshot.rng, None
    set_rng_state(rng)
    num_before, num_now = len(rng["cuda"]), torch.cuda.device_count()
    if num_before != num_now and runner.engine.device.type == "cuda" and runner.engine.is_main_process:
        logger.warning(
            "%s was saved where a process saw %d GPUs, and %d are visible now: the generators of the first %d are "
            "restored, the others start from new states (dropout, augmentation on the device); to resume exactly, set "
            "CUDA_VISIBLE_DEVICES to the same number of GPUs",
            snapshot.source, num_before, num_now, min(num_before, num_now),
        )  # fmt: skip


def _checkpoint_callbacks(runner: IRunner) -> Iterator[ICheckpointCallback]:
    found = map(innermost, runner.callbacks.values())
    return (each for each in found if isinstance(each, ICheckpointCallback))
