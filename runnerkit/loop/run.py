"""The loop: stages, their epochs, a pass over each loader, its batches."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from runnerkit.loop import checks
from runnerkit.loop.attributes import ProcessState
from runnerkit.loop.determinism import deterministic_algorithms
from runnerkit.loop.error_context import add_context
from runnerkit.loop.listeners import Listeners
from runnerkit.loop.loader_pass import Pass, is_training
from runnerkit.loop.position import Position
from runnerkit.loop.run_logs import RunLogs
from runnerkit.loop.run_status import RunStatus
from runnerkit.loop.stage import Stage
from runnerkit.models.modes import Modes
from runnerkit.passes.required_metrics import check_required_metrics
from runnerkit.resume.resume_point import ResumePoint
from runnerkit.sampling.sharding import share_of
from runnerkit.seeding.generators import keep_rng, set_global_seed
from runnerkit.types import Batch, as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IListener, IRunner
    from runnerkit.loop.run_result import RunResult
    from runnerkit.monitor import Monitor


class Run(ProcessState):
    """One ``run()`` of a runner, as ``runner.current_run``; an evaluation within a run is a second object.

    The runner is passed in: an object that referred to it would keep its loaders' workers until garbage is collected.

    Args:
        given_hooks: an object whose ``get_*`` methods make the components in place of the runner's; None outside an
            evaluation.
        monitor: of the whole run; the run raises before training if its loader or its metric does not exist.

    Attributes:
        stage: the stage under way, as the engine prepared it.
        position: writes the counters and the metrics of epochs.
        logs: the connection to the loggers.
        status: writes the status file.
        resume_point: the checkpoint that the run continues from, if there is one.
        state: "new", "running", "finished", or "failed".
        failure: the exception's type, message and notes of a run that failed.
    """

    def __init__(
        self,
        given_hooks: Any = None,
        *,
        resume_point: ResumePoint | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.given_hooks = given_hooks
        self.monitor = monitor
        self.stage = Stage()
        self.position = Position()
        self.logs = RunLogs()
        self.status = RunStatus()
        self.resume_point = resume_point or ResumePoint()
        self.state: Literal["new", "running", "finished", "failed"] = "new"
        self.failure = ""

    def launch(self, runner: IRunner) -> None:
        """Run on the engine's processes; the runner of the calling process then has the model and the metrics."""
        self.state = "running"
        try:
            result = runner.engine.launch(partial(self._run_experiment, runner))
            result.apply(runner, given=self.hooks_of(runner)._caller_callbacks)
        except BaseException as error:
            self.state, self.failure = "failed", "".join(traceback.format_exception_only(error)).strip()
            raise
        self.state = "finished"

    # ------------------------------------------------------------------------------------------------------ the loop

    def _run_experiment(self, runner: IRunner) -> RunResult:
        from runnerkit.loop.run_result import RunResult, data_of

        data = data_of(vars(runner))
        # Models that a script makes after each of several runs would all start alike, from the run's seed.
        with keep_rng(), self._experiment(runner):  # sets up; closes even after an error, on_exception included
            self.emit("on_experiment_start", runner)
            for key in checks.check_stages(self.hooks_of(runner).stages):
                self._run_stage(runner, key)
            self.stage.close(runner)
            self.stage.listeners.bind(runner, self.stage.known_callbacks)  # those of all stages
            self.emit("on_experiment_end", runner)
        runner.engine.cleanup()  # after a failure, launch() does this once it is recorded: then other ranks fail too
        return RunResult.of(runner, had=data)

    def _run_stage(self, runner: IRunner, key: str) -> None:
        if not self.stage.open(runner, key):
            return  # the run resumes in a later stage
        self.emit("on_stage_start", runner)
        self.resume_point.restore(runner)
        check_required_metrics(runner)
        self._open_loggers(runner)
        while self.resume_point.is_epoch_left(runner) and not runner.need_early_stop:
            self._run_epoch(runner)
        self.stage.evaluation_weights.end()
        self.emit("on_stage_end", runner)

    def _run_epoch(self, runner: IRunner) -> None:
        if not self.resume_point.is_within_epoch:
            self.position.start_epoch(runner)
        self.stage.enter_training()
        self.emit("on_epoch_start", runner)
        budget = self.stage.budget
        for key in self.resume_point.loaders_left(runner):
            trains = is_training(key, runner.stage_key)
            is_done = budget.is_over(runner) if trains else self.position.is_validated(runner)
            if not is_done or self.resume_point.is_within_epoch:
                self._run_pass(runner, key)
        self.position.end_epoch(runner)
        self.emit("on_epoch_end", runner)

    # Each function call of a step counts: its events are called without emit, and its end is not a method.

    def _run_pass(self, runner: IRunner, key: str) -> None:
        current, stage = Pass.begin(runner, key), self.stage
        step, budget = current.gradient_step, stage.budget
        with torch.set_grad_enabled(runner.is_train_loader):
            self.emit("on_loader_start", runner)
            for batch in current.batches(runner):
                self.run_batch(runner, batch)
                if runner.is_train_loader and step.stepped_at == runner.batch_step:
                    every = runner.valid_every_steps
                    if every is not None and step.is_due(runner, every) and not budget.is_evaluated_next(runner):
                        self._validate(runner)
                    for listener in stage.listeners["on_step_end"]:
                        listener(runner)
                    if budget.may_end_early and budget.is_over(runner):
                        runner.need_early_stop = True
                if runner.need_early_stop:
                    break
            current.finish(runner)

    def run_batch(self, runner: IRunner, batch: Batch) -> None:
        """Handle a batch that is on the device, in the runner's current pass, as the loop does."""
        current, stage = runner.loader_pass, self.stage
        current.start_batch(runner, batch)
        for listener in stage.listeners["on_batch_start"]:
            listener(runner)
        with stage.autocast:
            runner.handle_batch(runner.batch)
        for listener in stage.listeners[current.gradient_step.batch_end]:
            listener(runner)
        current.finish_batch(runner)

    def _validate(self, runner: IRunner) -> None:
        """Run the evaluation loaders in the middle of a training loader, whose pass then continues unchanged."""
        modes = Modes(as_dict(self.stage.training_model).values())  # also evaluation mode of a whole model
        with runner.loader_pass.suspended(runner), keep_rng():
            for key in runner.loaders:
                if not key.startswith("train"):
                    self._run_pass(runner, key)
        self.stage.use_model(runner)
        modes.restore()
        self.position.note_validation(runner)
        self.emit("on_validation_end", runner)

    def emit(self, event: str, runner: IRunner) -> None:
        """Call the methods that act on `event`."""
        self.stage.listeners.emit(event, runner)

    # --------------------------------------------------------------------------------------------- beginning and end

    @contextmanager
    def _experiment(self, runner: IRunner) -> Iterator[None]:
        """Set up devices and the process group and seed this process; on exit, close the logs even after an error."""
        engine = runner.engine
        try:
            engine.setup()
            engine.check_communicator()
            engine.in_use = True
            self.stage.autocast = engine.autocast()
            self.stage.listeners.bind(runner)
            checks.warn_of_misspelt([runner], engine)
            set_global_seed(runner.seed)
            if engine.is_main_process:
                self.logs.collect_early()
            with ExitStack() as modes:
                if runner.deterministic:
                    modes.enter_context(deterministic_algorithms(engine))
                if runner.detect_anomaly:
                    modes.enter_context(torch.autograd.set_detect_anomaly(True))
                yield
        except BaseException as error:
            runner.exception = error
            add_context(runner, error)
            engine.record_failure(error)  # before the user's hooks, which may hang
            self._emit_exception(runner, error)
            raise
        finally:
            engine.in_use = False
            self._close(runner)

    def _emit_exception(self, runner: IRunner, error: BaseException) -> None:
        listeners = Listeners()
        listeners.bind(runner, self.stage.known_callbacks)  # also those of earlier stages
        listeners.emit_exception(runner, error)

    def _close(self, runner: IRunner) -> None:
        with ExitStack() as closing:  # a failure does not keep the others open
            closing.callback(self.stage.listeners.release)
            closing.callback(self.logs.unlock, runner)  # last, when nothing is written anymore
            closing.push(partial(self._close_status, runner))
            closing.callback(self.stage.close, runner)
            closing.callback(self.logs.close, runner)
            if self.stage.step_watch is not None:
                closing.callback(self.stage.step_watch.leave, runner)
            for loader in [*runner.loaders.values(), *self.stage.left_out_loaders.values()]:
                closing.callback(share_of(loader).close)

    def _close_status(self, runner: IRunner, _: object, error: BaseException | None, __: object) -> None:
        """Write how the run ended, given an error of what was closed before."""
        self.status.close(runner, runner.exception or error)

    # --------------------------------------------------------------------------------------------------------------

    def hooks_of(self, runner: IRunner) -> Any:
        """Return the object whose hooks make the components."""
        return self.given_hooks or runner

    def receives(self, listener: IListener, event: str) -> bool:
        """Return whether a listener gets an event: all do, except in an evaluation within another run."""
        return self.given_hooks is None or self.given_hooks.receives(listener, event)

    def describe(self, runner: IRunner) -> str:
        """Describe how far the run is, in one line, as far as this process knows it.

        >>> from runnerkit import dl
        >>> runner = dl.SupervisedRunner()
        >>> runner.current_run.describe(runner)
        'has not run'
        """
        if self.state == "new":
            return "has not run"
        by = type(runner.engine).__name__
        if runner.engine.num_processes > 1:
            by += f", {runner.engine.num_processes} processes"
        if runner.epoch_step == 0 and self.state == "failed":  # in other processes, or before the first epoch
            return f"failed ({by})"
        if self.state != "running":
            num_steps = runner.optimizer_step
            steps = f"{num_steps:,} optimizer step{'s' * (num_steps != 1)}"
            return f"{self.state} in epoch {runner.epoch_step:,}, after {steps} ({by})"
        if not runner.engine.in_use:
            return f"running ({by}); metrics arrive at the end"
        of = f" of {runner.stage_epoch_len:,}" if runner.stage_epoch_len is not None else ""
        place = f"stage {runner.stage_key}, epoch {runner.stage_epoch_step:,}{of}"
        if runner.loader_key:
            of = f" of {runner.loader_batch_len:,}" if runner.loader_batch_len is not None else ""
            place += f", loader {runner.loader_key}, batch {runner.loader_batch_step:,}{of}"
        return f"running: {place} ({by})"

    def renewed(self) -> Self:
        """Return a run of the same hooks from the same checkpoint, which has not begun."""
        point = self.resume_point.renewed()
        return type(self)(self.given_hooks, resume_point=point, monitor=self.monitor)

    def _open_loggers(self, runner: IRunner) -> None:
        """Open the loggers, once, on rank zero, after all input has been checked."""
        if self.logs.is_open:
            return
        self.logs.is_open = True
        if runner.engine.is_main_process:
            self.resume_point.leave_branch(runner)
            loggers = self.hooks_of(runner).get_loggers()
            self.logs.open(runner, loggers, resumed_at=self.resume_point.logged_step(runner))
            self.status.open(runner, self.logs.logdirs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a run for a copy of the runner: with the same model, listeners to be bound to the copy, and no logs.

        Without it a copy would have a second model, and the locks and callbacks of this one.
        """
        copied = type(self)(self.given_hooks, resume_point=self.resume_point, monitor=self.monitor)
        copied.position = copy.deepcopy(self.position, memo)
        copied.stage = self.stage.of_copy()
        copied.state, copied.failure = self.state, self.failure
        return copied
