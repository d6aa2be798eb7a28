"""Checkpointing: save the last, the best and periodic checkpoints, and resume from one."""

from __future__ import annotations

import logging
import math
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runnerkit.callback import CallbackOrder, ICheckpointCallback, optimizer_callbacks
from runnerkit.checkpoints.cleanup import clean_up, set_branch_aside
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.checkpoints.index import Record, name_at
from runnerkit.checkpoints.judge import Judge, best_first
from runnerkit.checkpoints.plain_state import copied
from runnerkit.checkpoints.weights import find_weights
from runnerkit.errors import UnknownKeyError
from runnerkit.loop.loader_pass import is_training
from runnerkit.loop.stop_signals import TIME_IS_UP, StopRequests, heeded, stopped_by
from runnerkit.models.finite import non_finite_part
from runnerkit.resume import run_state
from runnerkit.resume.scored_weights import ScoredWeights, with_scored
from runnerkit.steps.budget import ends_within_epoch, is_epoch_left
from runnerkit.steps.learning import is_due
from runnerkit.storage import claims
from runnerkit.storage.atomic_file import check_folder
from runnerkit.storage.remote.urls import local_path, shown
from runnerkit.support.arguments import check_integers, check_numbers, check_paths, check_strings
from runnerkit.support.background import Background
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["CheckpointCallback"]

logger = logging.getLogger(__name__)

_CLOCK_STEPS = 20  # steps between two agreements on the time: each one is a broadcast


class CheckpointCallback(ICheckpointCallback):
    """Save checkpoints at the end of epochs, optionally more often, and keep the best and the last.

    Files in `logdir`/checkpoints: ``model.0003.pth`` (epoch 3), ``last.pth`` and ``best.pth`` (additional names), and
    ``index.json``. If processes save their own shards (``sharded_checkpoints=True`` of an engine), a checkpoint of mode
    "runner" is a folder: ``model.0003``, ``last``, ``best``.

    In mode "runner", SIGTERM, SIGUSR1, SIGHUP (a lost connection) or SIGINT (Ctrl-C) to any process saves a checkpoint
    and ends the run after the current step or evaluation, with exit code 75, or 130 (and KeyboardInterrupt) for SIGINT.
    A second Ctrl-C ends the run immediately, as does another signal that arrives more than a second after the first.
    Signals that your code already handles are left alone. If the position of the training loader cannot be saved (it is
    not a DataLoader, or has a DistributedSampler), nothing is saved and the newest checkpoint stays.

    Args:
        logdir: folder of the run.
        loader_key, metric_key: the metric that selects the best checkpoint; None keeps no best one.
        minimize: whether smaller values are better.
        topk: number of best checkpoints to keep.
        mode: "runner" saves all state, to resume from; "model" saves a plain ``state_dict``.
        save_last, save_best: which of the two names to create.
        every_epochs: save every `every_epochs` epochs of a stage and after its last one; only these can be the best.
        every_steps: also save every `every_steps` optimizer steps.
        every_minutes: also save every `every_minutes` minutes, by rank zero's clock.
        asynchronous: write checkpoints in a thread, so that a step waits only for a copy in memory. A save waits for
            the previous one, and the end of the run for the last one.
        resume_model: checkpoint, file of weights (also ``.safetensors``), or pretrained model's folder to start the run
            with.
        resume_runner: checkpoint or logdir to resume from.
        load_best_on_end: end a stage with the weights of its best checkpoint.
        max_hours: save and end the run like a signal, with exit code 75, this many hours after this process started it,
            by rank zero's clock; mode "runner" only. A resumed run has as many hours again.
        trainable_only: leave out parameters without ``requires_grad``, and store a hash of them in their place. To load
            such a checkpoint, the model needs the same frozen parameters: those of the pretrained model, with adapters.
    Raises:
        ValueError: only one of `loader_key` and `metric_key` is given, or both without `minimize`.
        FileExistsError: at the start of the run, the folder holds checkpoints of another run.
        OSError: a save failed; names the path and the free space. Earlier checkpoints are intact.

    >>> CheckpointCallback("logs", loader_key="valid", metric_key="loss", minimize=True).requires
    (('valid', 'loss'),)
    """

    def __init__(
        self,
        logdir: str | Path,
        loader_key: str | None = None,
        metric_key: str | None = None,
        minimize: bool | None = None,
        topk: int = 1,
        mode: Literal["model", "runner"] = "model",
        save_last: bool = True,
        save_best: bool = True,
        every_epochs: int = 1,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        asynchronous: bool = False,
        resume_model: str | Path | None = None,
        resume_runner: str | Path | None = None,
        load_best_on_end: bool = False,
        max_hours: float | None = None,
        trainable_only: bool = False,
    ) -> None:
        super().__init__(order=CallbackOrder.Checkpoint)
        check_paths(self, logdir=logdir)
        check_paths(self, or_none=True, resume_model=resume_model, resume_runner=resume_runner)
        check_strings(self, or_none=True, loader_key=loader_key, metric_key=metric_key)
        check_integers(self, topk=topk, every_epochs=every_epochs)
        check_integers(self, or_none=True, every_steps=every_steps)
        check_numbers(self, above=0, or_none=True, every_minutes=every_minutes, max_hours=max_hours)
        if (loader_key is None) != (metric_key is None):
            raise ValueError(
                "CheckpointCallback: pass both loader_key and metric_key, or neither; got "
                f"{loader_key!r} and {metric_key!r}"
            )
        if mode not in ("model", "runner"):
            raise ValueError(f"CheckpointCallback: mode must be 'model' or 'runner', got {mode!r}")
        if max_hours is not None and mode != "runner":
            raise ValueError("CheckpointCallback: max_hours saves the full state, to resume from: pass mode='runner'")
        if load_best_on_end and metric_key is None:
            raise ValueError(
                "CheckpointCallback: load_best_on_end=True needs loader_key and metric_key to select a checkpoint"
            )
        if metric_key is not None and minimize is None:
            raise ValueError(
                f"CheckpointCallback: pass minimize=True if smaller values of {metric_key!r} are better, else "
                "minimize=False"
            )
        self.logdir = local_path(logdir)  # absolute: the run may change the working directory
        self.folder = self.logdir / "checkpoints"
        self.loader_key = loader_key
        self.metric_key = metric_key
        self.minimize = minimize
        self.topk = topk
        self.mode = mode
        self.save_last = save_last
        self.save_best = save_best
        self.every_epochs = every_epochs
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.max_hours = max_hours
        self.asynchronous = asynchronous
        self.resume_model = resume_model
        self.resume_runner = str(resume_runner) if resume_runner is not None else None
        self.load_best_on_end = load_best_on_end
        self.trainable_only = trainable_only
        self._frozen_hashes: dict[tuple[str, ...], str] = {}  # of this stage, as hashing a large model takes seconds
        self._judge: Judge | None = None
        if loader_key is not None and metric_key is not None:
            self.requires = ((loader_key, metric_key),)
            self._judge = Judge(loader_key, metric_key, bool(minimize))
        self._scored: ScoredWeights | None = None  # of the loader's last evaluation in this epoch
        self._is_due = self._is_validated = False
        self._saved_at = self._began_at = 0.0
        self._background = Background()
        self._stop = StopRequests()
        # The checkpoint at the place where a limit ended the run within an epoch, the path of one in another folder; ""
        # if the loader lacks a position.
        self._cut_at: str | None = None
        self._has_finite = False  # a checkpoint that one with spoiled weights must not replace; rank zero knows
        self._stop_for: int | None = None  # the signal that all processes agreed to stop for
        self._signals = ExitStack()

    def on_experiment_start(self, runner: IRunner) -> None:
        self._began_at = time.monotonic()
        if runner.engine.is_main_process:
            self._open_folder(runner)

    def _open_folder(self, runner: IRunner) -> None:
        folder = CheckpointFolder(self.folder)
        if folder.records and runner.epoch_step == 0 and not runner.is_resumed:
            raise FileExistsError(
                f"{shown(self.folder)} holds the checkpoints of another run: pass "
                'resume="auto" (or resume_runner) to resume it, or choose another logdir'
            )
        folder.make()
        self._has_finite = bool(folder.records)
        clean_up(folder, resumed_from=runner._resume_point.source)

    def leave_branch(self, source: Path, *, stage: str, place: tuple[int, float]) -> None:
        folder = CheckpointFolder(self.folder)
        if self._judge is not None:
            self._judge.judge_again(folder)
        set_branch_aside(folder, source=source, place=place, best_first=self._best(folder, stage))
        self._point(folder, stage)  # the process may have been killed between writing the index and the names

    def on_stage_start(self, runner: IRunner) -> None:
        self._stop, self._stop_for, self._scored = StopRequests(), None, None
        self._frozen_hashes.clear()
        if self.trainable_only and runner.engine.never_whole:
            raise ValueError("trainable_only=True hashes frozen parameters, which no process holds with init='meta'")
        if self.mode == "runner":
            self._signals.enter_context(heeded(self._stop.ask))
        often = {name: getattr(self, name) for name in ("every_steps", "every_minutes", "max_hours")}
        if self.loader_key is not None:
            often["valid_every_steps"] = runner.valid_every_steps
        reason = next((name for name, interval in often.items() if interval), None)
        if reason is not None and self.mode == "runner":
            run_state.check_positions(runner, reason=reason)
        self._saved_at = time.monotonic()
        if self.resume_model is not None and runner.stage_key == next(iter(runner.stages)):
            run_state.load_weights_from(runner, find_weights(self.resume_model, which="last"))

    def on_loader_start(self, runner: IRunner) -> None:
        source = runner._resume_point.source
        if source is not None and runner.is_train_loader and ends_within_epoch(runner):
            # The limit was reached before this run: one with a higher limit continues at the same place.
            named = source.with_name(self._file(runner))  # not last.pth, which this run moves
            place = named if named.exists() else source
            self._cut_at = place.name if place.parent == self.folder else str(place)

    def keep_scored_weights(self, runner: IRunner) -> None:
        if runner.loader_key == self.loader_key and not runner.is_train_loader:
            self._scored = ScoredWeights(runner)

    def on_validation_end(self, runner: IRunner) -> None:
        self._is_validated = self._is_due = self.loader_key is not None

    def on_step_end(self, runner: IRunner) -> None:
        if self.mode == "runner" and self._stop_for is None:
            self._ask_in_time(runner)
            self._stop_for = self._stop.due(runner.batch_step, runner.engine)
        ends_here = self.mode == "runner" and ends_within_epoch(runner)  # a run with a higher limit continues here
        if ends_here and not run_state.knows_position(runner.loader):
            self._cut_at, ends_here = "", False
        self._is_due = self._is_due or self._stop_for is not None or self._is_time(runner) or ends_here
        # Checkpoints hold no gradients: wait until an accumulated step is complete.
        if self._is_due and not any(each.num_pending for each in optimizer_callbacks(runner.callbacks)):
            if self._stop_for is None or run_state.knows_position(runner.loader):
                score = self._score(runner) if self._is_validated else None
                why_not = self._save(runner, score=score)
                if score is not None and not why_not:
                    self._scored = None  # an evaluation has one score
                if ends_here:
                    self._cut_at = "" if why_not else self._file(runner)
            else:
                why_not = f"the position of loader {runner.loader_key!r} within an epoch cannot be saved"
            if self._stop_for is not None:
                self._stop_run(runner, self._stop_for, why_not)

    def _ask_in_time(self, runner: IRunner) -> None:
        is_up = self.max_hours is not None and time.monotonic() - self._began_at >= 3600 * self.max_hours
        if is_up and runner.engine.is_main_process:
            self._stop.ask(TIME_IS_UP)

    def _is_time(self, runner: IRunner) -> bool:
        if self.every_steps is not None and is_due(runner, self.every_steps):
            return True
        if self.every_minutes is None or runner.batch_step % _CLOCK_STEPS:
            return False
        # Every rank must enter, at the same step: this broadcasts.
        return runner.engine.broadcast_object(time.monotonic() - self._saved_at >= 60 * self.every_minutes)

    def on_epoch_end(self, runner: IRunner) -> None:
        stop = self._stop_for
        if self.mode == "runner" and stop is None:
            self._ask_in_time(runner)
            stop = self._stop.agree(runner.batch_step, runner.engine)
        is_last = runner.need_early_stop or not is_epoch_left(runner)
        why_not = ""
        if stop is not None or is_last or runner.stage_epoch_step % self.every_epochs == 0:
            why_not = self._save(runner, score=self._score(runner))
        self._cut_at = self._scored = None
        if stop is not None and not is_last:
            self._stop_run(runner, stop, why_not)

    def _stop_run(self, runner: IRunner, number: int, why_not: str) -> None:
        self._background.wait()
        claims.wait(self.folder.parent)
        runner.engine.barrier()  # the first rank to exit ends the others: wait until rank zero has written
        name = f"max_hours={self.max_hours:g}" if number == TIME_IS_UP else signal.Signals(number).name
        if runner.engine.is_main_process and not why_not:
            logger.warning("%s: saved a checkpoint and stopped after step %d", name, runner.batch_step)
        elif runner.engine.is_main_process:
            newest = next((each.name for each in reversed(CheckpointFolder(self.folder).records)), None)
            logger.warning(
                "%s: stopped after step %d without saving, because %s; a resumed run starts %s",
                name, runner.batch_step, why_not,
                f"from {newest}" if newest else "from the beginning: there is no checkpoint yet",
            )  # fmt: skip
        raise stopped_by(number)

    def _score(self, runner: IRunner) -> float | None:
        if self.loader_key is None or self.metric_key is None or self.loader_key not in runner.epoch_metrics:
            return None
        if not is_training(runner, self.loader_key) and (self._scored is None or not self._scored.are_known(runner)):
            return None  # trained since, perhaps before the run was interrupted
        metrics = runner.epoch_metrics[self.loader_key]
        if self.metric_key not in metrics:
            raise UnknownKeyError(
                f"CheckpointCallback chooses the best checkpoint by metric {self.metric_key!r} of loader "
                f"{self.loader_key!r}, which has only {sorted(metrics)}"
            )
        return metrics[self.metric_key]

    def _save(self, runner: IRunner, *, score: float | None) -> str:
        """Save, and return an empty string, or why nothing was saved; every rank must call."""
        self._is_due = self._is_validated = False
        self._saved_at = time.monotonic()
        runner._logs.flush(runner)
        if spoiled := self._spoiled_part(runner):
            return spoiled
        # Every rank must enter: this gathers.
        if self.mode == "runner":
            state = {**run_state.state_of(runner), "cut_at": self._cut_at}
        else:
            state = run_state.weights_to_save(runner, whole=not runner.engine.never_whole)
        if self.loader_key is not None:
            scored = self._scored.state if self._scored is not None and score is not None else None
            state = with_scored(runner, state, scored, mode=self.mode, whole=not self._is_sharded(runner))
        if self.trainable_only:
            state = self._without_frozen(runner, state)
        file = self._file(runner)
        what = {
            "kind": self.mode, "stage": runner.stage_key, "epoch": runner.epoch_step, "batch": runner.batch_step,
            "score": score, "judged_by": self._judge.to_dict() if self._judge is not None else None,
            "metrics": {key: dict(metrics) for key, metrics in runner.epoch_metrics.items()},
        }  # fmt: skip
        if self._is_sharded(runner):
            write = self._shards_writer(runner, state, file, what)
        elif runner.engine.is_main_process:
            write = partial(self._write, copied(state) if self.asynchronous else state, file, what)
        else:
            return ""
        if self.asynchronous:
            self._background.start(write)
        else:
            write()
        return ""

    def _spoiled_part(self, runner: IRunner) -> str:
        """Describe weights that must not replace finite ones; an empty string if they may be saved."""
        engine = runner.engine
        parts = engine.gather_object(non_finite_part(run_state.modules_of(runner)))
        if not any(parts):
            self._has_finite = True
            return ""
        if not engine.broadcast_object(self._has_finite):
            return ""  # better than nothing: there is no other
        rank, part = next((rank, part) for rank, part in enumerate(parts) if part)
        where = f" on rank {rank}" if engine.num_processes > 1 else ""
        why = f"{part!r} of the model is NaN or infinite{where}"
        if engine.is_main_process and self._stop_for is None:
            logger.warning(
                "step %d: not saved, because %s; earlier checkpoints are kept, and non_finite='raise' ends such a run",
                runner.batch_step, why,
            )  # fmt: skip
        return why

    def _without_frozen(self, runner: IRunner, state: StateDict) -> StateDict:
        if self.mode == "model":
            return run_state.without_frozen(runner, state, self._frozen_hashes)
        parts = dict(state)
        for name in {"model_state_dict", "trained_model_state_dict"} & state.keys():
            parts[name] = run_state.without_frozen(runner, state[name], self._frozen_hashes)
        return parts

    def _is_sharded(self, runner: IRunner) -> bool:
        return runner.engine.never_whole or (self.mode == "runner" and runner.engine.sharded_checkpoints)

    def _file(self, runner: IRunner) -> str:
        """Return the name of the checkpoint at this place."""
        name = name_at(runner.epoch_step, runner.batch_step if runner.is_within_loader else math.inf)
        return name if self._is_sharded(runner) else f"{name}.pth"

    def _shards_writer(self, runner: IRunner, state: StateDict, name: str, what: dict[str, Any]) -> Callable[[], None]:
        self._background.wait()  # the previous save may still be writing to this folder
        temporary = CheckpointFolder(self.folder).temporary(name)
        if runner.engine.is_main_process:
            check_folder(self.folder)
            if temporary.exists():
                shutil.rmtree(temporary)  # left by a killed run
        runner.engine.barrier()
        finish = runner.engine.save_shards(state, temporary, asynchronous=self.asynchronous)

        def write() -> None:
            rest = finish()  # every rank must call: this gathers
            if runner.engine.is_main_process:
                self._write(rest, name, what)

        return write

    def _write(self, state: StateDict, name: str, what: dict[str, Any]) -> None:
        check_folder(self.folder)
        folder = CheckpointFolder(self.folder)
        record = folder.add(name, state, **what)
        best = self._point(folder, record.stage)
        # Keep the last but one as well: a resume falls back to it if the last is damaged.
        folder.keep([*best[: self.topk], *folder.records[-2:]])
        shards = {name: state["shards"]["files"]} if "shards" in state else {}
        claims.publish(self.folder.parent, {each.name: each.sha256 for each in folder.records}, shards)

    def _point(self, folder: CheckpointFolder, stage: str | None) -> list[Record]:
        """Point the names "last" and "best" to their checkpoints; return the scored checkpoints, best first."""
        best = self._best(folder, stage)
        if self.save_last and folder.records:
            folder.point("last", folder.records[-1])
        if self.save_best and best:
            folder.point("best", best[0])
        return best

    def _best(self, folder: CheckpointFolder, stage: str | None) -> list[Record]:
        """Sort the scored checkpoints of one stage, best first; scores of different stages are not comparable."""
        own = [record for record in folder.records if record.stage in (stage, None)]
        return best_first(own, self._judge)

    def on_exception(self, runner: IRunner) -> None:
        try:
            self._background.close()  # finish the save that was started
        except Exception as error:  # the run's own exception must reach the caller
            logger.warning("the last checkpoint could not be written: %s", error)
        with suppress(OSError):
            self.folder.rmdir()  # removes only an empty folder: a rejected call leaves nothing behind
        self._signals.close()

    def on_experiment_end(self, runner: IRunner) -> None:
        self._background.close()

    def on_stage_end(self, runner: IRunner) -> None:
        self._background.wait()
        self._signals.close()
        runner.engine.barrier()  # rank zero has named the last checkpoint: now every rank can read it
        if not self.load_best_on_end:
            return
        engine = runner.engine
        path = self._best_path(runner) if engine.is_main_process else None
        place = (path, shown(path)) if path is not None else None
        if is_sharded := self._is_sharded(runner):
            claims.wait(self.folder.parent)  # the shards of other machines are only in the store
        # Every rank must enter: this broadcasts, because only rank zero is guaranteed to see the files.
        if engine.never_whole:
            if (place := engine.broadcast_object(place)) is not None:
                run_state.load_weights_from(runner, claims.bring(*place))
            return
        path = claims.bring(*place) if place is not None and is_sharded else path
        state = engine.broadcast_object(load_checkpoint(path) if path is not None else None)
        if state is not None:
            run_state.load_model_state(runner, state.get("model_state_dict", state), source="the best checkpoint")

    def _best_path(self, runner: IRunner) -> Path | None:
        folder = CheckpointFolder(self.folder)
        best = self._best(folder, runner.stage_key)
        if not best:
            logger.warning(
                "load_best_on_end: %r of loader %r was not a number at any checkpoint of stage %r; keeping the last "
                "weights",
                self.metric_key, self.loader_key, runner.stage_key,
            )  # fmt: skip
            return None
        return self.folder / best[0].name
