"""The loop: stages, their epochs, a pass over each loader, its batches."""

from __future__ import annotations

import copy
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from runnerkit.loop.attributes import ProcessState
from runnerkit.loop.experiment import experiment
from runnerkit.loop.loader_pass import Pass, is_training, restoring_pass
from runnerkit.loop.position import Position
from runnerkit.loop.run_logs import RunLogs
from runnerkit.loop.run_status import RunStatus
from runnerkit.loop.stage import Stage
from runnerkit.passes.required_metrics import check_required_metrics
from runnerkit.resume.resume_point import ResumePoint
from runnerkit.seeding.generators import keep_rng
from runnerkit.steps.budget import is_evaluated_next, is_over
from runnerkit.types import Batch

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
        from runnerkit.loop import run_result

        self.state = "running"
        try:
            result = runner.engine.launch(partial(self._run_experiment, runner))
            run_result.adopt(runner, result, given=self.hooks_of(runner)._caller_callbacks)
        except BaseException as error:
            self.state, self.failure = "failed", "".join(traceback.format_exception_only(error)).strip()
            raise
        self.state = "finished"

    # ------------------------------------------------------------------------------------------------------ the loop

    def _run_experiment(self, runner: IRunner) -> RunResult:
        from runnerkit.loop import run_result

        data = run_result.data_of(runner)
        with experiment(runner):  # sets up; closes even after an error, on_exception included
            self.emit("on_experiment_start", runner)
            for key in self.hooks_of(runner).stages:
                self._run_stage(runner, key)
            self.stage.close(runner)
            self.stage.listeners.bind(runner, self.stage.known_callbacks)  # those of all stages
            self.emit("on_experiment_end", runner)
        runner.engine.cleanup()  # after a failure, launch() does this once it is recorded: then other ranks fail too
        return run_result.result_of(runner, had=data)

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
        for key in self.resume_point.loaders_left(runner):
            is_done = is_over(runner) if is_training(runner, key) else self.position.is_validated(runner)
            if not is_done or self.resume_point.is_within_epoch:
                self._run_pass(runner, key)
        self.position.end_epoch(runner)
        self.emit("on_epoch_end", runner)

    # Each function call of a step counts: its events are called without emit, and its end is not a method.

    def _run_pass(self, runner: IRunner, key: str) -> None:
        current, stage = Pass.begin(runner, key), self.stage
        step = current.gradient_step
        with torch.set_grad_enabled(runner.is_train_loader):
            self.emit("on_loader_start", runner)
            for batch in current.batches(runner):
                self.run_batch(runner, batch)
                if runner.is_train_loader and step.stepped_at == runner.batch_step:
                    every = runner.valid_every_steps
                    if every is not None and step.is_due(runner, every) and not is_evaluated_next(runner):
                        self._validate(runner)
                    for listener in stage.listeners["on_step_end"]:
                        listener(runner)
                    if stage.may_end_early and is_over(runner):
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
        with restoring_pass(runner), keep_rng():
            for key in runner.loaders:
                if not key.startswith("train"):
                    self._run_pass(runner, key)
        self.stage.use_model(runner)
        self.position.note_validation(runner)
        self.emit("on_validation_end", runner)

    def emit(self, event: str, runner: IRunner) -> None:
        """Call the methods that act on `event`."""
        self.stage.listeners.emit(event, runner)

    # --------------------------------------------------------------------------------------------------------------

    def hooks_of(self, runner: IRunner) -> Any:
        """Return the object whose hooks make the components."""
        return self.given_hooks or runner

    def receives(self, listener: IListener, event: str) -> bool:
        """Return whether a listener gets an event: all do, except in an evaluation within another run."""
        return self.given_hooks is None or self.given_hooks.receives(listener, event)

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
            loggers = dict(self.hooks_of(runner).get_loggers())
            self.logs.open(runner, loggers, resumed_at=self.resume_point.logged_step(runner))
            self.status.open(runner, self.logs.logdirs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a run for a copy of the runner: with the same model, listeners to be bound to the copy, and no logs.

        Without it a copy would have a second model, and the locks and callbacks of this one.
        """
        copied = type(self)(self.given_hooks, resume_point=self.resume_point)
        copied.position = copy.deepcopy(self.position, memo)
        copied.stage = self.stage.of_copy()
        copied.state, copied.failure = self.state, self.failure
        return copied
