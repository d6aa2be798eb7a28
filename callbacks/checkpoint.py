"""Checkpointing: save the last, the best and periodic checkpoints, and resume from one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runnerkit.callback import CallbackOrder, ICheckpointCallback, innermost, optimizer_callbacks
from runnerkit.callbacks.control.parts.stop_on_signal import StopOnSignal
from runnerkit.callbacks.control.parts.store_attribute import StoreAttribute
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.index import name_at
from runnerkit.checkpoints.plain_state import copied
from runnerkit.checkpoints.store import CheckpointStore
from runnerkit.checkpoints.weights import find_weights
from runnerkit.errors import UnknownKeyError
from runnerkit.loop.loader_pass import is_training
from runnerkit.metrics.renamed import current_name
from runnerkit.monitor import Mode, Monitor, ThreeArguments
from runnerkit.resume.loader_place import check_positions, knows_position
from runnerkit.resume.run_weights import RunWeights
from runnerkit.resume.scored_weights import ScoredWeights
from runnerkit.resume.snapshot import Snapshot
from runnerkit.storage.remote.urls import local_path
from runnerkit.support.arguments import check_integers, check_numbers, check_paths
from runnerkit.support.deprecation import Renamed, accepts_old_names
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["CheckpointCallback"]

logger = logging.getLogger(__name__)

_CLOCK_BATCHES = 20  # at least as many between two agreements on the time: each one is a broadcast


class CheckpointCallback(ICheckpointCallback):
    """Save checkpoints at the end of epochs, optionally more often, and keep the best and the last.

    Files in `logdir`/checkpoints: ``model.0003.pth`` (epoch 3), ``last.pth`` and ``best.pth`` (additional names), and
    ``index.json``. If processes save their own shards (``sharded_checkpoints=True`` of an engine), a checkpoint of
    content "runner" is a folder: ``model.0003``, ``last``, ``best``.

    If content is "runner", SIGTERM, SIGUSR1, SIGHUP (a lost connection) or SIGINT (Ctrl-C) to any process saves one
    and ends the run after the current step or evaluation, with exit code 75, or 130 (and KeyboardInterrupt) for SIGINT.
    A second Ctrl-C ends the run immediately, as does another signal that arrives more than a second after the first.
    Signals that your code already handles are left alone. If the position of the training loader cannot be saved (it is
    not a DataLoader, or has a DistributedSampler), nothing is saved and the newest checkpoint stays.

    Args:
        logdir: folder of the run.
        monitor: the metric that selects the best checkpoint, such as "valid/loss"; None keeps no best one.
        mode: whether smaller ("min") or larger ("max") values of it are better; may be left out for a loss.
        keep_best: number of best checkpoints to keep.
        content: "runner" saves all state, to resume from; "model" saves a plain ``state_dict``.
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
            by rank zero's clock; content "runner" only. A resumed run has as many hours again.
        trainable_only: leave out parameters without ``requires_grad``, and store a hash of them in their place. To load
            such a checkpoint, the model needs the same frozen parameters: those of the pretrained model, with adapters.
    Raises:
        ValueError: `monitor` is not "loader/metric", or needs a `mode`.
        FileExistsError: at the start of the run, the folder holds checkpoints of another run.
        OSError: a save failed; names the path and the free space. Earlier checkpoints are intact.

    >>> CheckpointCallback("logs", monitor="valid/loss", mode="min").requires
    (('valid', 'loss'),)
    """

    store_class = CheckpointStore  # how and where: a subclass of the callback may name another

    folder = StoreAttribute[Path]()
    keep_best = StoreAttribute[int]()
    topk = StoreAttribute[int]("keep_best")  # its name before 0.2.0
    save_last = StoreAttribute[bool]()
    save_best = StoreAttribute[bool]()

    @accepts_old_names(
        Renamed("mode", "content", {"model": "model", "runner": "runner"}),
        Renamed("topk", "keep_best"),
        Renamed("save_n_best", "keep_best"),
        ThreeArguments(),
        by_position=("loader_key", "metric_key", "minimize", "topk", "mode", "save_last", "save_best",
                     "every_epochs", "every_steps", "every_minutes", "asynchronous", "resume_model", "resume_runner",
                     "load_best_on_end", "max_hours", "trainable_only"),
    )  # fmt: skip
    def __init__(
        self,
        logdir: str | Path,
        *,
        monitor: str | None = None,
        mode: Mode | None = None,
        keep_best: int = 1,
        content: Literal["model", "runner"] = "model",
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
        check_integers(self, keep_best=keep_best, every_epochs=every_epochs)
        check_integers(self, or_none=True, every_steps=every_steps)
        check_numbers(self, above=0, or_none=True, every_minutes=every_minutes, max_hours=max_hours)
        if content not in ("model", "runner"):
            raise ValueError(f"CheckpointCallback: content must be 'model' or 'runner', got {content!r}")
        if max_hours is not None and content != "runner":
            raise ValueError("CheckpointCallback: max_hours saves the full state, to resume: pass content='runner'")
        if load_best_on_end and monitor is None:
            raise ValueError(
                "CheckpointCallback: load_best_on_end=True needs monitor=, such as 'valid/loss', to select a checkpoint"
            )
        selects = Monitor.if_given("CheckpointCallback", monitor, mode)
        selects = selects.directed("CheckpointCallback") if selects is not None else None
        self.logdir = local_path(logdir)  # absolute: the run may change the working directory
        self.content: Literal["model", "runner"] = content
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
        self.requires = (selects.pair,) if selects is not None else ()
        self._scored: ScoredWeights | None = None  # of the loader's last evaluation in this epoch
        self._is_due = self._is_validated = False
        self._saved_at = 0.0
        self._next_look = 0  # at the clock: the same `batch_step` on all ranks
        # The checkpoint at the place where a limit ended the run within an epoch, the path of one in another folder; ""
        # if the loader lacks a position.
        self._cut_at: str | None = None
        self._has_finite = False  # a checkpoint that one with spoiled weights must not replace; rank zero knows
        self._store = self.store_class(
            self.logdir, selects, keep_best=keep_best, save_last=save_last, save_best=save_best
        )
        self._stop = StopOnSignal(max_hours, self._store)

    @property
    def monitor(self) -> Monitor | None:
        return self._store.monitor

    @monitor.setter
    def monitor(self, monitor: Monitor | None) -> None:
        self._store.monitor = monitor

    def on_experiment_start(self, runner: IRunner) -> None:
        self._stop.start_clock()
        self._use_current_name(runner)
        if runner.engine.is_main_process:
            earlier = map(innermost, runner.current_run.stage.known_callbacks[:-1])  # the last is this one
            of_earlier_stages = {each.folder for each in earlier if isinstance(each, CheckpointCallback)}
            self._has_finite = self._store.open(
                continues=self.folder in of_earlier_stages or runner.is_resumed,
                resumed_from=runner.current_run.resume_point.source,
            )

    def leave_branch(self, source: Path, *, stage: str, place: tuple[int, float]) -> None:
        self._store.leave_branch(source, stage=stage, place=place)

    def on_stage_start(self, runner: IRunner) -> None:
        self._scored = self._cut_at = None
        self._is_due = self._is_validated = False
        self._frozen_hashes.clear()
        if self.content == "runner":
            self._stop.listen()
        often: dict[str, float | None] = {
            "every_steps": self.every_steps,
            "every_minutes": self.every_minutes,
            "max_hours": self.max_hours,
        }
        if self.monitor is not None:
            often["valid_every_steps"] = runner.valid_every_steps
        reason = next((name for name, interval in often.items() if interval), None)
        if reason is not None and self.content == "runner":
            check_positions(runner.loaders, reason=reason)
        self._saved_at, self._next_look = time.monotonic(), runner.batch_step + _CLOCK_BATCHES
        if self.resume_model is not None and runner.stage_key == next(iter(runner.stages)):
            RunWeights(runner).load_from(find_weights(self.resume_model, which="last"))

    def on_loader_start(self, runner: IRunner) -> None:
        source, budget = runner.current_run.resume_point.source, runner.current_run.stage.budget
        if source is not None and runner.is_train_loader and budget.ends_within_epoch(runner):
            # The limit was reached before this run: one with a higher limit continues at the same place.
            named = source.with_name(self._file(runner))  # not last.pth, which this run moves
            place = named if named.exists() else source
            self._cut_at = place.name if place.parent == self.folder else str(place)

    def keep_scored_weights(self, runner: IRunner) -> None:
        if self.monitor is not None and runner.loader_key == self.monitor.loader and not runner.is_train_loader:
            self._scored = ScoredWeights(runner)

    def on_validation_end(self, runner: IRunner) -> None:
        self._is_validated = self._is_due = self.monitor is not None

    def on_step_end(self, runner: IRunner) -> None:
        stop = self._stop.after_step(runner) if self.content == "runner" else None
        # A run with a higher limit continues here.
        ends_here = self.content == "runner" and runner.current_run.stage.budget.ends_within_epoch(runner)
        if ends_here and not knows_position(runner.loader):
            self._cut_at, ends_here = "", False
        self._is_due = self._is_due or stop is not None or self._is_time(runner) or ends_here
        # Checkpoints hold no gradients: wait until an accumulated step is complete.
        if self._is_due and not any(each.num_pending for each in optimizer_callbacks(runner.callbacks)):
            if stop is None or knows_position(runner.loader):
                score = self._score(runner) if self._is_validated else None
                why_not = self._save(runner, score=score)
                if score is not None and not why_not:
                    self._scored = None  # an evaluation has one score
                if ends_here:
                    self._cut_at = "" if why_not else self._file(runner)
            else:
                why_not = f"the position of loader {runner.loader_key!r} within an epoch cannot be saved"
            if stop is not None:
                self._stop.end(runner, stop, why_not=why_not)

    def _is_time(self, runner: IRunner) -> bool:
        if self.every_steps is not None and runner.gradient_step.is_due(runner, self.every_steps):
            return True
        # Compared, not divided: a step of two batches, in an epoch that begins after an odd number, never ends at a
        # multiple.
        if self.every_minutes is None or runner.batch_step < self._next_look:
            return False
        self._next_look = runner.batch_step + _CLOCK_BATCHES
        # Every rank must enter, at the same step: this broadcasts.
        return runner.engine.broadcast_object(time.monotonic() - self._saved_at >= 60 * self.every_minutes)

    def on_epoch_end(self, runner: IRunner) -> None:
        stop = self._stop.after_epoch(runner) if self.content == "runner" else None
        is_last = runner.need_early_stop or not runner.current_run.stage.budget.is_epoch_left(runner)
        why_not = ""
        if stop is not None or is_last or runner.stage_epoch_step % self.every_epochs == 0:
            why_not = self._save(runner, score=self._score(runner))
        self._cut_at = self._scored = None
        if stop is not None:
            self._stop.end(runner, stop, why_not=why_not)

    def _score(self, runner: IRunner) -> float | None:
        if self.monitor is None or self.monitor.loader not in runner.epoch_metrics:
            return None
        is_trained = is_training(self.monitor.loader, runner.stage_key)
        if not is_trained and (self._scored is None or not self._scored.are_known(runner)):
            return None  # trained since, perhaps before the run was interrupted
        loader, metric = self.monitor.pair
        metrics = runner.epoch_metrics[loader]
        if metric not in metrics:
            raise UnknownKeyError(
                f"CheckpointCallback chooses the best checkpoint by metric {metric!r} of loader {loader!r}, which has "
                f"only {sorted(metrics)}"
            )
        return metrics[metric]

    def _save(self, runner: IRunner, *, score: float | None) -> str:
        """Save, and return an empty string, or why nothing was saved; every rank must call: this gathers."""
        self._is_due = self._is_validated = False
        self._saved_at = time.monotonic()
        runner.current_run.logs.flush(runner)
        if spoiled := self._spoiled_part(runner):
            return spoiled
        snapshot = Snapshot.of(runner, kind=self.content, cut_at=self._cut_at)
        if self.monitor is not None:
            snapshot.use_scored(runner, self._scored.state if self._scored is not None and score is not None else None)
        if self.trainable_only:
            snapshot.leave_out_frozen(runner, self._frozen_hashes)
        state = snapshot.state
        file = self._file(runner)
        what = {
            "kind": self.content, "stage": runner.stage_key, "epoch": runner.epoch_step, "batch": runner.batch_step,
            "score": score, "metrics": {key: dict(metrics) for key, metrics in runner.epoch_metrics.items()},
        }  # fmt: skip
        if self._is_sharded(runner):
            write = self._shards_writer(runner, state, file, what)
        elif runner.engine.is_main_process:
            write = partial(self._store.write, copied(state) if self.asynchronous else state, file, what)
        else:
            return ""
        if self.asynchronous:
            self._store.start(write)
        else:
            write()
        return ""

    def _spoiled_part(self, runner: IRunner) -> str:
        """Describe weights that must not replace finite ones; an empty string if they may be saved."""
        engine = runner.engine
        parts = engine.gather_object(RunWeights(runner).spoiled_part())
        if not any(parts):
            self._has_finite = True
            return ""
        if not engine.broadcast_object(self._has_finite):
            return ""  # better than nothing: there is no other
        rank, part = next((rank, part) for rank, part in enumerate(parts) if part)
        where = f" on rank {rank}" if engine.num_processes > 1 else ""
        why = f"{part} is NaN or infinite{where}"
        if engine.is_main_process and self._stop.number is None:
            logger.warning(
                "step %d: not saved, because %s; earlier checkpoints are kept, and non_finite='raise' ends such a run",
                runner.batch_step, why,
            )  # fmt: skip
        return why

    def _is_sharded(self, runner: IRunner) -> bool:
        return runner.engine.never_whole or (self.content == "runner" and runner.engine.sharded_checkpoints)

    def _file(self, runner: IRunner) -> str:
        """Return the name of the checkpoint at this place."""
        name = name_at(runner.epoch_step, runner.batch_step if runner.is_within_loader else math.inf)
        return name if self._is_sharded(runner) else f"{name}.pth"

    def _shards_writer(self, runner: IRunner, state: StateDict, name: str, what: dict[str, Any]) -> Callable[[], None]:
        temporary = self._store.prepare_shards(name, is_main_process=runner.engine.is_main_process)
        runner.engine.barrier()
        finish = runner.engine.save_shards(state, temporary, asynchronous=self.asynchronous)

        def write() -> None:
            rest = finish()  # every rank must call: this gathers
            if runner.engine.is_main_process:
                self._store.write(rest, name, what)

        return write

    def on_exception(self, runner: IRunner) -> None:
        try:
            self._store.close()  # finish the save that was started
        except Exception as error:  # the run's own exception must reach the caller
            logger.warning("the last checkpoint could not be written: %s", error)
        with suppress(OSError):
            self.folder.rmdir()  # removes only an empty folder: a rejected call leaves nothing behind
        self._stop.close()

    def on_experiment_end(self, runner: IRunner) -> None:
        self._store.close()

    def on_stage_end(self, runner: IRunner) -> None:
        self._store.wait()
        self._stop.close()
        runner.engine.barrier()  # rank zero has named the last checkpoint: now every rank can read it
        if not (self.load_best_on_end or self.load_best_of_run):
            return
        engine = runner.engine
        place = self._best(runner) if engine.is_main_process else None
        if is_sharded := self._is_sharded(runner):
            self._store.wait(stored=True)  # the shards of other machines are only in the store
        # Every rank must enter: this broadcasts, because only rank zero is guaranteed to see the files.
        if engine.never_whole:
            if (place := engine.broadcast_object(place)) is not None:
                RunWeights(runner).load_from(self._store.local(*place))
            return
        path = None if place is None else self._store.local(*place) if is_sharded else place[0]
        state = engine.broadcast_object(load_checkpoint(path) if path is not None else None)
        if state is not None:
            RunWeights(runner).load(state.get("model_state_dict", state), source="the best checkpoint")

    def _best(self, runner: IRunner) -> tuple[Path, str] | None:
        best = self._store.best(runner.stage_key)
        if best is None:
            logger.warning(
                "load_best_on_end: %r of loader %r was not a number at any checkpoint of stage %r; keeping the last "
                "weights",
                self.metric_key, self.loader_key, runner.stage_key,
            )  # fmt: skip
        elif record := self._store.best_record(runner.stage_key):
            score = f"{self.metric_key} of {self.loader_key} {record.score:.4g}"
            runner.current_run.logs.notice(runner, f"loaded the best weights, of epoch {record.epoch}: {score}")
        return best

    def _use_current_name(self, runner: IRunner) -> None:
        """Select by today's name of a metric that was renamed."""
        provided = {metric for callback in runner.callbacks.values() for metric in callback.provides}
        if self.monitor is not None:
            self.monitor = replace(self.monitor, metric=current_name(self.monitor.metric, provided))
            self.requires = (self.monitor.pair,)
