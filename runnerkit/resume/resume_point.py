"""The point where a run resumes: its checkpoint is found and restored, and the interrupted loader is re-entered."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from runnerkit.callback import ICallback, ICheckpointCallback, innermost
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.folder import find_checkpoint, holds_checkpoint
from runnerkit.logger import Step
from runnerkit.loop.hooks import call_hook
from runnerkit.resume import compatibility
from runnerkit.resume.snapshot import Snapshot
from runnerkit.steps.budget import StageBudget
from runnerkit.storage.claims import bring
from runnerkit.storage.remote.urls import shown
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


@dataclass
class ResumePoint:
    """The checkpoint that a run continues from, if there is one. The runner is passed in, as to a run's position.

    Args:
        wanted: checkpoint or logdir; None starts from the beginning.
        may_be_missing: whether `wanted` may hold no checkpoint, as with ``resume="auto"``.
        continues_logs: whether the logs in the logdir belong to this run, even without a checkpoint.

    Attributes:
        found: the checkpoint's state, on all ranks.
    """

    wanted: str | Path | None = None
    _: KW_ONLY
    may_be_missing: bool = False
    continues_logs: bool = False
    found: Snapshot | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._wants_logs = self.continues_logs

    def renewed(self) -> Self:
        """Return a point for another run of the same runner, without the checkpoint that this one found."""
        return replace(self, continues_logs=self._wants_logs)

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

    @property
    def is_within_epoch(self) -> bool:
        """True if the run is about to continue in the middle of an epoch."""
        return self.found is not None and self.found.within is not None

    def has_logged(self, stage: str) -> bool:
        """Return whether the logdir holds what the interrupted run logged when it started this stage."""
        return self.continues_logs and self.found is not None and self.found.step.stage == stage

    def is_epoch_left(self, runner: IRunner) -> bool:
        """Return whether the stage has an epoch to start or to finish."""
        return self.is_within_epoch or runner.current_run.stage.budget.is_epoch_left(runner)

    def loaders_left(self, runner: IRunner) -> list[str]:
        """Return the keys of the epoch's loaders, starting with the interrupted one if there is one."""
        keys = list(runner.loaders)
        if self.found is None or self.found.within is None:
            return keys
        return keys[keys.index(self.found.within.key) :]

    def find(self, runner: IRunner, stage: str) -> bool:
        """Look once for the checkpoint to resume from; return False if it belongs to a later stage."""
        if self.found is None and not runner.current_run.logs.is_open:
            given = [each.resume_runner for each in _checkpoint_callbacks(runner.callbacks)]
            if self.wanted is not None or any(given):
                from runnerkit.resume.state_broadcast import broadcast_state  # late, as few runs need it

                # Every rank must enter. Rank zero decides and reads for all, as only it is sure to see the files.
                found = self._read(runner, given) if runner.engine.is_main_process else (None, False)
                if runner.engine.never_whole:
                    self.found, self.continues_logs = _mapped_by_all(found, runner)
                else:
                    self.found, self.continues_logs = broadcast_state(found, runner.engine)
        return self.found is None or self.found.is_restored or self.found.state["stage_key"] == stage

    def _read(self, runner: IRunner, given: list[str | None]) -> tuple[Snapshot | None, bool]:
        """Return the state to resume from, if there is one, and whether the logs in the logdir belong to this run."""
        if self.wanted is not None and (not self.may_be_missing or holds_checkpoint(Path(self.wanted))):
            return _load(self.wanted, runner), self.continues_logs
        source = next((each for each in given if each), None)
        return (None, self.continues_logs) if source is None else (_load(source, runner), True)

    def restore(self, runner: IRunner) -> None:
        """Restore the state, once, into components that exist and callbacks that have started."""
        if self.found is None or self.found.is_restored:
            return
        self.found.apply(runner)
        is_last = runner.stage_key == [*runner.stages][-1]
        is_over = not self.is_epoch_left(runner) and not runner.need_early_stop
        if is_last and is_over and runner.engine.is_main_process:
            # A warning, because it is shown without logging.basicConfig(); a run that does nothing looks broken.
            logger.warning("%s", runner.current_run.stage.budget.describe_end(runner))
        else:
            step = self.found.step
            where = f", within loader {step.loader!r}" if self.is_within_epoch else ""
            text = f"resumed from {shown(self.found.source)}: epoch {step.epoch}, step {step.batch:,}{where}"
            runner.current_run.logs.notice(runner, text)

    def leave_branch(self, runner: IRunner) -> None:
        """Discard checkpoints saved after the one that the run continues from.

        Rank zero calls this before the logs are cut, so that the newest checkpoint always belongs to the same branch.
        """
        if self.found is not None:
            for callback in _checkpoint_callbacks(runner.callbacks):
                callback.leave_branch(Path(self.found.source), stage=runner.stage_key, place=self.found.place)

    def logged_step(self, runner: IRunner) -> Step | None:
        """Return the last step whose logs are kept, step 0 without a checkpoint; None if the run starts new logs."""
        if not self.continues_logs:
            return None
        if self.found is None:
            return Step("", "", 0, 0)
        step, within = self.found.step, self.found.within
        if within is None:
            return step
        # If they ran within the epoch, at this step, the evaluation loaders had ended.
        is_validated = within.is_validated
        if is_validated is None:
            every = runner.valid_every_steps
            is_validated = every is not None and runner.optimizer_step % every < runner.steps_per_batch
        return replace(step, unended=frozenset([step.loader] if is_validated else runner.loaders))

    def enter_loader(self, runner: IRunner) -> int:
        """Move to the place where the loader was interrupted, if it was; return the number of batches skipped."""
        if self.found is None or self.found.within is None:
            return 0
        place, self.found.within = self.found.within, None
        return place.enter(runner, num_processes=len(self.found.state["rng"]))

    def restore_rng(self, runner: IRunner) -> None:
        """Set the generators to the interrupted run's states, once."""
        if self.found is not None:
            self.found.restore_rng(runner)


def _load(source: str | Path, runner: IRunner) -> Snapshot:
    path, hooks = find_checkpoint(source), runner.current_run.hooks_of(runner)
    how = {"whole": not runner.engine.sharded_checkpoints, "mapped": runner.engine.never_whole}
    state = load_checkpoint(path, **how)
    compatibility.check_format(state, path)
    if _is_cut(state, hooks):
        try:
            if not state["cut_at"]:
                raise ValueError("the position of its loader cannot be saved")
            before = path.parent / state["cut_at"]
            state, path = load_checkpoint(find_checkpoint(before), **how), before
        except (FileNotFoundError, ValueError) as error:
            logger.warning("the run ended within an epoch, and continues with the next one: %s", error)
    compatibility.check_place(state, path, stages=list(hooks.stages))
    return Snapshot(state, str(path))


def _is_cut(state: StateDict, hooks: Any) -> bool:
    """Return whether a limit ended the run within an epoch, and has been raised since."""
    if state.get("cut_at") is None:
        return False
    budget, counters = StageBudget(call_hook(hooks.get_stage_len, stage=state["stage_key"])), state["counters"]
    done = {"num_steps": counters["stage_optimizer_step"], "num_samples": counters["stage_sample_step"]}
    return not budget.is_reached(epoch=counters["stage_epoch_step"], **done)


def _mapped_by_all(found: tuple[Snapshot | None, bool], runner: IRunner) -> tuple[Snapshot | None, bool]:
    """Return what rank zero found, read by each process itself: only the parts that it uses."""
    snapshot, continues = found
    source = snapshot.source if snapshot else None
    source, url, continues = runner.engine.broadcast_object((source, shown(source or ""), continues))
    if source is None or snapshot is not None:
        return snapshot, continues
    path = bring(source, url)
    return Snapshot(load_checkpoint(path, whole=False, mapped=True), str(path)), continues


def _checkpoint_callbacks(callbacks: Mapping[str, ICallback]) -> Iterator[ICheckpointCallback]:
    found = map(innermost, callbacks.values())
    return (each for each in found if isinstance(each, ICheckpointCallback))
