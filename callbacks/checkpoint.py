"""Checkpoints: the last, the best, every so often; and going on from one."""

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

from runnerkit import run_logs, snapshot
from runnerkit.arguments import check_integers, check_numbers, check_paths, check_strings
from runnerkit.background import Background
from runnerkit.callback import CallbackOrder, ICheckpointCallback, IOptimizerCallback, innermost
from runnerkit.preemption import StopRequests, heeded, stopped_by
from runnerkit.storage.atomic_file import check_folder
from runnerkit.storage.checkpoint import CheckpointFolder, find_checkpoint
from runnerkit.storage.checkpoint_cleanup import clean_up, leave_branch
from runnerkit.storage.checkpoint_file import load_checkpoint
from runnerkit.storage.checkpoint_index import Record, name_at
from runnerkit.storage.plain_state import copied
from runnerkit.storage.weights import read_weights
from runnerkit.types import StateDict
from runnerkit.unknown_key import UnknownKeyError

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

_CLOCK_STEPS = 20  # processes agree on the time this often: each time is a broadcast


class CheckpointCallback(ICheckpointCallback):
    """Save a checkpoint at the end of epochs, and oftener if asked; keep the best and the last.

    Files in `logdir`/checkpoints: model.0003.pth (epoch 3); ``last.pth``, ``best.pth`` (more names); ``index.json``.
    Where processes save their own parts (``sharded_checkpoints=True`` of an engine), a checkpoint of mode "runner" is a
    folder: model.0003, last, best.

    In mode "runner" SIGTERM, SIGUSR1, SIGHUP (a lost connection) or SIGINT (Ctrl-C) to any process saves and ends the
    run after the step under way, or after the evaluation, with exit code 75, or 130 (and KeyboardInterrupt) for SIGINT.
    A second Ctrl-C ends it at once, another signal if it comes more than a second after the first. What the user
    handles is left to the user. A training loader without a position to save (one that is not a DataLoader, or has a
    DistributedSampler) leaves the newest checkpoint as it is.

    Args:
        logdir: folder of the run.
        loader_key, metric_key: what makes one the best; None keeps no best one.
        minimize: whether the best is the smallest.
        topk: how many of the best to keep.
        mode: "runner" saves all state, to resume from; "model" a plain ``state_dict``.
        save_last, save_best: which names to give.
        every_epochs: save at the end of every so many of a stage's epochs, and of its last; others cannot be the best.
        every_steps: save also after every so many training steps.
        every_minutes: save also after so much time, by rank zero's clock.
        asynchronous: let a step wait for a copy in memory only, which a thread writes. A save waits for the one before,
            the run's end for the last.
        resume_model: checkpoint, or file of weights (``.safetensors`` too), to start the run with.
        resume_runner: checkpoint, or logdir, to go on from.
        load_best_on_end: end a stage with the weights of the best of its checkpoints.
    Raises:
        ValueError: one of `loader_key` and `metric_key` without the other, or both without `minimize`.
        FileExistsError: when the run starts, the folder holds another run's checkpoints.
        OSError: a save failed, with the path and the space that is left; the checkpoints before are whole.

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
    ) -> None:
        super().__init__(order=CallbackOrder.Checkpoint)
        check_paths(self, logdir=logdir)
        check_paths(self, or_none=True, resume_model=resume_model, resume_runner=resume_runner)
        check_strings(self, or_none=True, loader_key=loader_key, metric_key=metric_key)
        check_integers(self, topk=topk, every_epochs=every_epochs)
        check_integers(self, or_none=True, every_steps=every_steps)
        check_numbers(self, above=0, or_none=True, every_minutes=every_minutes)
        if (loader_key is None) != (metric_key is None):
            raise ValueError(
                f"CheckpointCallback: loader_key and metric_key go together, got {loader_key!r} and {metric_key!r}"
            )
        if mode not in ("model", "runner"):
            raise ValueError(f"CheckpointCallback: mode must be 'model' or 'runner', got {mode!r}")
        if load_best_on_end and metric_key is None:
            raise ValueError(
                "CheckpointCallback: load_best_on_end=True needs loader_key and metric_key, which tell the best one"
            )
        if metric_key is not None and minimize is None:
            raise ValueError(
                f"CheckpointCallback: is a small {metric_key!r} good? pass minimize=True or minimize=False"
            )
        self.logdir = Path(logdir).absolute()  # wherever the run goes
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
        self.asynchronous = asynchronous
        self.resume_model = resume_model
        self.resume_runner = str(resume_runner) if resume_runner is not None else None
        self.load_best_on_end = load_best_on_end
        if loader_key is not None and metric_key is not None:
            self.requires = ((loader_key, metric_key),)
        self._is_due = self._is_validated = False
        self._saved_at = 0.0
        self._background = Background()
        self._stop = StopRequests()
        self._stop_for: int | None = None  # the signal that all processes agreed to stop for
        self._signals = ExitStack()

    def on_experiment_start(self, runner: IRunner) -> None:
        if runner.engine.is_main_process:
            self._open_folder(runner)

    def _open_folder(self, runner: IRunner) -> None:
        folder = CheckpointFolder(self.folder)
        if folder.records and runner.epoch_step == 0 and not runner.is_resumed:
            raise FileExistsError(
                f'{self.folder} holds the checkpoints of another run: pass resume="auto" (or resume_runner) to go on '
                "with it, or choose another logdir"
            )
        folder.make()
        clean_up(folder, resumed_from=Path(runner._snapshot.source) if runner._snapshot else None)

    def leave_branch(self, source: Path, *, stage: str, place: tuple[int, float]) -> None:
        folder = CheckpointFolder(self.folder)
        leave_branch(folder, source=source, place=place, best_first=self._best(folder, stage))
        self._point(folder, stage)  # a kill may have come between the index and the names

    def on_stage_start(self, runner: IRunner) -> None:
        self._stop, self._stop_for = StopRequests(), None
        if self.mode == "runner":
            self._signals.enter_context(heeded(self._stop.ask))
        often = {"every_steps": self.every_steps, "every_minutes": self.every_minutes}
        if self.loader_key is not None:
            often["valid_every_steps"] = runner.valid_every_steps
        reason = next((name for name, interval in often.items() if interval), None)
        if reason is not None and self.mode == "runner":
            snapshot.check_positions(runner, reason=reason)
        self._saved_at = time.monotonic()
        if self.resume_model is not None and runner.stage_key == next(iter(runner.stages)):
            path = find_checkpoint(self.resume_model)
            snapshot.load_model_state(runner, read_weights(path), source=str(path))

    def on_validation_end(self, runner: IRunner) -> None:
        self._is_validated = self._is_due = self.loader_key is not None

    def on_step_end(self, runner: IRunner) -> None:
        if self.mode == "runner" and self._stop_for is None:
            self._stop_for = self._stop.due(runner.batch_step, runner.engine)
        self._is_due = self._is_due or self._stop_for is not None or self._is_time(runner)
        # In the middle of an accumulated step there are gradients that no checkpoint holds: wait for its end.
        if self._is_due and not any(
            each.num_pending
            for each in map(innermost, runner.callbacks.values())
            if isinstance(each, IOptimizerCallback)
        ):
            can_save = self._stop_for is None or snapshot.has_position(runner.loader)
            if can_save:
                self._save(runner, score=self._score(runner) if self._is_validated else None)
            if self._stop_for is not None:
                self._stop_run(runner, self._stop_for, is_saved=can_save)

    def _is_time(self, runner: IRunner) -> bool:
        if self.every_steps is not None and runner.batch_step % self.every_steps == 0:
            return True
        if self.every_minutes is None or runner.batch_step % _CLOCK_STEPS:
            return False
        # Every rank must enter, and all at the same step: this broadcasts.
        return runner.engine.broadcast_object(time.monotonic() - self._saved_at >= 60 * self.every_minutes)

    def on_epoch_end(self, runner: IRunner) -> None:
        stop = self._stop_for
        if self.mode == "runner" and stop is None:
            stop = self._stop.agree(runner.batch_step, runner.engine)
        is_last = runner.need_early_stop or runner.stage_epoch_step == runner.stage_epoch_len
        if stop is not None or is_last or runner.stage_epoch_step % self.every_epochs == 0:
            self._save(runner, score=self._score(runner))
        if stop is not None and not is_last:
            self._stop_run(runner, stop)

    def _stop_run(self, runner: IRunner, number: int, *, is_saved: bool = True) -> None:
        self._background.wait()
        runner.engine.barrier()  # who leaves first ends the others: not before rank zero has written
        name = signal.Signals(number).name
        if runner.engine.is_main_process and is_saved:
            logger.warning("%s: saved, and stopped after step %d", name, runner.batch_step)
        elif runner.engine.is_main_process:
            newest = next((each.name for each in reversed(CheckpointFolder(self.folder).records)), None)
            logger.warning(
                "%s: stopped after step %d without saving, since loader %r has no position to save in the middle of an "
                "epoch; a resume starts %s", name, runner.batch_step, runner.loader_key,
                f"from {newest}" if newest else "from the beginning: there is no checkpoint yet",
            )  # fmt: skip
        raise stopped_by(number)

    def _score(self, runner: IRunner) -> float | None:
        if self.loader_key is None or self.metric_key is None or self.loader_key not in runner.epoch_metrics:
            return None
        metrics = runner.epoch_metrics[self.loader_key]
        if self.metric_key not in metrics:
            raise UnknownKeyError(
                f"no metric {self.metric_key!r} of loader {self.loader_key!r} to tell the best by: {sorted(metrics)}"
            )
        return metrics[self.metric_key]

    def _save(self, runner: IRunner, *, score: float | None) -> None:
        self._is_due = self._is_validated = False
        self._saved_at = time.monotonic()
        run_logs.flush_logs(runner)
        # Every rank must enter: this gathers.
        if self.mode == "runner":
            state = snapshot.capture(runner)
        else:
            state = snapshot.judged_state(runner, snapshot.model_state(runner))
        name = name_at(runner.epoch_step, runner.batch_step if runner.is_within_loader else math.inf)
        judge = {"loader": self.loader_key, "metric": self.metric_key, "minimize": self.minimize}
        what = {
            "kind": self.mode, "stage": runner.stage_key, "epoch": runner.epoch_step, "batch": runner.batch_step,
            "score": score, "judged_by": judge if self.metric_key is not None else None,
            "metrics": {key: dict(metrics) for key, metrics in runner.epoch_metrics.items()},
        }  # fmt: skip
        if self.mode == "runner" and runner.engine.sharded_checkpoints:
            write = self._shards_writer(runner, state, name, what)
        elif runner.engine.is_main_process:
            write = partial(self._write, copied(state) if self.asynchronous else state, f"{name}.pth", what)
        else:
            return
        if self.asynchronous:
            self._background.start(write)
        else:
            write()

    def _shards_writer(self, runner: IRunner, state: StateDict, name: str, what: dict[str, Any]) -> Callable[[], None]:
        self._background.wait()  # a folder that the one before may be writing
        temporary = CheckpointFolder(self.folder).temporary(name)
        if runner.engine.is_main_process:
            check_folder(self.folder)
            if temporary.exists():
                shutil.rmtree(temporary)  # a run that was killed left it
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
        # The one before the last stays too: it is what a resume falls back to if the last is damaged.
        folder.keep([*best[: self.topk], *folder.records[-2:]])

    def _point(self, folder: CheckpointFolder, stage: str | None) -> list[Record]:
        """Give the last and the best their names; return the scored ones, best first."""
        best = self._best(folder, stage)
        if self.save_last and folder.records:
            folder.point("last", folder.records[-1])
        if self.save_best and best:
            folder.point("best", best[0])
        return best

    def _best(self, folder: CheckpointFolder, stage: str | None) -> list[Record]:
        """Sort those of a stage, which alone are alike; those without a number are none."""
        own = [record for record in folder.records if record.stage in (stage, None)]
        scored = [record for record in own if record.score is not None and not math.isnan(record.score)]
        return sorted(scored, key=lambda record: record.score or 0.0, reverse=not self.minimize)

    def on_exception(self, runner: IRunner) -> None:
        try:
            self._background.close()  # what was seen to be saved is kept
        except Exception as error:  # the run's own exception is the one to raise
            logger.warning("the last checkpoint could not be written: %s", error)
        with suppress(OSError):
            self.folder.rmdir()  # if it is empty: a call that was refused leaves nothing
        self._signals.close()

    def on_experiment_end(self, runner: IRunner) -> None:
        self._background.close()

    def on_stage_end(self, runner: IRunner) -> None:
        self._background.wait()
        self._signals.close()
        if not self.load_best_on_end:
            return
        # Every rank must enter: this broadcasts, since only rank zero is sure to see the files.
        state = runner.engine.broadcast_object(self._best_state(runner) if runner.engine.is_main_process else None)
        if state is not None:
            snapshot.load_model_state(runner, state.get("model_state_dict", state), source="the best checkpoint")

    def _best_state(self, runner: IRunner) -> StateDict | None:
        folder = CheckpointFolder(self.folder)
        best = self._best(folder, runner.stage_key)
        if not best:
            logger.warning(
                "load_best_on_end: %r of loader %r was no number at any checkpoint of stage %r: the last weights stay",
                self.metric_key, self.loader_key, runner.stage_key,
            )  # fmt: skip
            return None
        return load_checkpoint(self.folder / best[0].name)
