"""One pass over one loader: its batches and their counters, and the reduction of its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from runnerkit.loop import batch_size, checks, parameter_checks
from runnerkit.loop.attributes import LoaderAttributes, ProcessState
from runnerkit.loop.loader_metrics import LoaderMetrics
from runnerkit.metrics.means import LoaderMeans
from runnerkit.metrics.renamed import NamedMetrics
from runnerkit.sampling.loader_members import LoaderMembers
from runnerkit.sampling.sharding import (
    batches_of,
    count_batches,
    gives_new_batches,
    is_length_sure,
    share_of,
    start_epoch,
)
from runnerkit.steps.gradient_step import GradientStep
from runnerkit.steps.learning import OwnSteps
from runnerkit.support.device_move import copied
from runnerkit.support.host_copy import as_number
from runnerkit.types import Batch, as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


_END = object()


class Pass(ProcessState):
    """One loader once, as ``runner.loader_pass``; a second pass, as a validation within this one, is a second object.

    `key` and `means` are for callbacks, the methods for the loop. They write the runner's
    :class:`~runnerkit.loop.attributes.LoaderAttributes`, apart from what `handle_batch` and callbacks may set, and from
    the place that a resume restores. The runner is passed in: an object that referred to it would keep the workers of
    its loaders.

    Attributes:
        key: of the loader.
        metrics: sums of this process until the loader ends, then the values over all processes.
        gradient_step: also ``runner.gradient_step``.
        own_steps: those that ``handle_batch`` makes itself.
        ends_stage: whether the stage ends after this epoch; within a loader, `need_early_stop` concerns that loader.
        num_skipped: batches that ran before the run was interrupted.
        num_processes: among which the loader's data is divided.
        first_batch: as the loader gave it, until its number of samples was checked.
    """

    def __init__(self, key: str = "", *, gradient_step: GradientStep | None = None, num_processes: int = 1) -> None:
        self.key = key
        self.metrics = LoaderMetrics()
        self.gradient_step = gradient_step or GradientStep()
        self.own_steps = OwnSteps()
        self.ends_stage = False
        self.num_skipped = 0
        self.num_processes = num_processes
        self.first_batch: Batch = None

    @property
    def means(self) -> LoaderMeans:
        """The batch metrics of this process, kept as weighted sums until the loader ends."""
        return self.metrics.means

    @classmethod
    def enter(cls, runner: IRunner, key: str) -> Self:
        """Make a new pass the runner's current one, before its first batch."""
        loader = runner.loaders[key]
        current = cls(key, num_processes=runner.engine.data_parallel.num_processes)
        runner.loader_pass, runner.gradient_step = current, current.gradient_step
        runner.loader_key, runner.loader = key, loader
        runner.loader_batch_step = runner.loader_sample_step = 0
        return current

    @classmethod
    def begin(cls, runner: IRunner, key: str) -> Self:
        """Start a pass: the order of its samples, the model's mode and empty sums."""
        current = cls.enter(runner, key)
        runner.is_train_loader = is_training(key, runner.stage_key)
        runner.is_infer_loader = key.startswith("infer") or runner.stage_key.startswith("infer")
        runner.is_valid_loader = not runner.is_train_loader and not runner.is_infer_loader
        current.ends_stage, runner.need_early_stop = runner.need_early_stop, False
        current.metrics.begin(runner)
        start_epoch(runner.loader, runner.epoch_step)
        current.num_skipped = runner.current_run.resume_point.enter_loader(runner)
        if runner.is_train_loader:
            runner.current_run.stage.budget.limit_pass(runner)
        num_batches = count_batches(runner.loader)
        runner.loader_batch_len = num_batches + runner.loader_batch_step if num_batches is not None else None
        runner.is_within_loader = True
        runner.current_run.stage.use_model(runner)
        runner.gradient_step = current.gradient_step = GradientStep.of_pass(runner, num_before=current.num_skipped)
        if runner.is_train_loader:
            if (watch := runner.current_run.stage.step_watch) is not None:
                watch.start_pass(runner)
            runner.current_run.logs.throughput.start(runner)
            before = runner.batch_step - runner.loader_batch_step
            runner.engine.enter_training_loader(lambda: runner.batch_step - before)
        return current

    def batches(self, runner: IRunner) -> Iterator[Batch]:
        """Yield the loader's batches on the device; an error while one is fetched counts as that batch's."""
        was_ended = runner.need_early_stop and self.num_skipped  # before the run was interrupted
        if was_ended or (runner.is_train_loader and runner.current_run.stage.budget.is_over(runner)):
            runner.current_run.resume_point.restore_rng(runner)
            return
        key, stage = runner.loader_key, runner.current_run.stage
        if runner.is_train_loader:
            parameter_checks.check_added(
                runner.optimizer, stage.training_model, runner.criterion, known=stage.optimized
            )
        if LoaderMembers(runner.loader).num_workers:
            runner.engine.settle()
        iterator = batches_of(runner.loader)
        runner.current_run.resume_point.restore_rng(runner)  # after iter(), which draws the workers' seed
        try:
            head = share_of(runner.loader).head
            if head is not None and key not in stage.compared_streams:
                if runner.engine.num_processes > 1:
                    iterator = checks.compare_streams(iterator, head, runner.engine, key=key)
                else:
                    iterator = checks.compare_workers(iterator, head, key=key)
                stage.compared_streams.add(key)
            length, accumulates = runner.loader_batch_len, self.gradient_step.accumulate
            is_doubtful = length is not None and runner.is_train_loader and not is_length_sure(runner.loader)
            if is_doubtful or (length is None and accumulates):
                iterator = self._with_its_end_known(runner, iterator, looks_ahead=accumulates)
            for batch in iterator:
                yield runner.engine.to_device(batch)
            if is_doubtful and length != runner.loader_batch_step and key not in stage.misstated_lengths:
                stage.misstated_lengths.add(key)
                checks.warn_of_length(key, runner.engine, num_batches=runner.loader_batch_step, length=length)
        except Exception:
            runner.loader_batch_step, runner.batch = runner.loader_batch_step + 1, None  # the missing one
            raise

    def _with_its_end_known(self, runner: IRunner, batches: Iterator[Batch], *, looks_ahead: bool) -> Iterator[Batch]:
        """Let the loader's length be right when its last batch begins, whatever the loader says.

        Args:
            looks_ahead: fetch each batch ahead; otherwise only those at the end that the loader claims, and beyond.
        """
        is_kept = gives_new_batches(runner.loader)
        batch = next(batches, _END)
        while batch is not _END:
            number, length = runner.loader_batch_step + 1, runner.loader_batch_len
            is_ahead = looks_ahead or (length is not None and number >= length)
            if is_ahead and not is_kept:
                batch = copied(batch)  # the loader may write the next one into the same memory
            following = next(batches, _END) if is_ahead else None
            if following is _END:
                runner.loader_batch_len = number
            elif length is not None and number >= length:
                runner.loader_batch_len, looks_ahead = None, True  # there are more
            yield batch
            batch = following if is_ahead else next(batches, _END)

    def start_batch(self, runner: IRunner, batch: Batch) -> None:
        """Count a batch and make it the runner's current one."""
        size = batch_size.batch_size_of(batch)
        runner.batch, runner.batch_size, runner.batch_weight, runner.batch_metrics = batch, size, None, {}
        runner.loader_batch_step += 1
        step = self.gradient_step
        if runner.loader_batch_step == 1:
            self.first_batch = batch
        num_samples = step.num_samples or size * self.num_processes
        if runner.loader_batch_step >= step.first_uneven:
            number = runner.loader_batch_step - 1 - self.num_skipped
            num_samples = step.begin_batch(runner, number=number) or num_samples
            if step.is_idle:
                from runnerkit.steps.idle_step import IdleStep  # late, as few runs need it

                step.idle = IdleStep(as_dict(runner.model).values())
        runner.loader_sample_step += num_samples
        if runner.is_train_loader:
            runner.current_run.position.count_batch(runner, num_samples)

    def finish_batch(self, runner: IRunner) -> None:
        """Add a batch's metrics to the sums; queue those of every `log_every`-th training step for the loggers."""
        step = self.gradient_step
        if runner.loader_batch_step == 1:
            self._check_batch_size(runner)
            checks.check_order_is_used(runner.loader, runner.engine, key=runner.loader_key)
            step.check(runner)
        if runner.is_train_loader and not step.has_steppers:
            self.own_steps.finish_batch(runner)
        if step.idle is not None:
            step.idle.end()
            step.idle = None
        else:
            if step.own_size is not None and runner.batch_size != step.own_size:
                step.warn_of_dropped_samples(runner)
            self.metrics.means.update(
                runner.batch_metrics, runner.batch_size, weight=runner.batch_weight, batch_step=runner.loader_batch_step
            )
        logs = runner.current_run.logs
        is_step = runner.is_train_loader and step.stepped_at == runner.batch_step
        if logs.wants_batch_metrics and is_step and runner.optimizer_step % runner.log_every < step.num_steps:
            logs.queue_step(runner)

    def finish(self, runner: IRunner) -> None:
        """End a pass: one reduction over processes, then the callbacks, then the loggers; every rank must call."""
        runner.need_early_stop = self.ends_stage
        runner.is_within_loader = False
        runner.batch_weight = None
        self._check_not_empty(runner)
        self.gradient_step.end_pass(runner)
        if runner.is_train_loader:
            if (watch := runner.current_run.stage.step_watch) is not None:
                watch.end_pass(runner)
            runner.engine.leave_training_loader(runner.loader_batch_step, key=self.key)
        run, num_samples = runner.current_run, self.metrics.reduce(runner)
        self._check_not_empty(runner, num_samples=num_samples)
        # Until here each process assumed that the others' batches are as large as its own.
        surplus, runner.loader_sample_step = runner.loader_sample_step - num_samples, num_samples
        if runner.is_train_loader:
            run.position.correct_samples(runner, surplus)
            self.metrics.check(runner)
            self.own_steps.check_losses(runner)
        run.emit("on_loader_end", runner)
        if not runner.is_train_loader:
            for model in as_dict(run.stage.training_model).values():
                runner.engine.training_model(model)  # evaluation is over, whatever comes next
        numbers = {name: as_number(name, value) for name, value in runner.loader_metrics.items()}
        runner.loader_metrics = NamedMetrics(numbers)
        run.position.end_loader(runner, self.key)
        run.status.note_metrics(self.key, runner.loader_metrics)
        run.logs.log_metrics(runner, runner.loader_metrics)
        run.logs.flush(runner)

    @contextmanager
    def suspended(self, runner: IRunner) -> Iterator[None]:
        """Let second passes run, and return to this one, or to the runner as it was before its first loader.

        A second pass is a second object, but users' code reads its batch, loader and metrics as attributes of the
        runner. After an exception nothing is restored: the runner shows where it failed.
        """
        outer = LoaderAttributes.of(runner)
        runner.need_early_stop = False  # it concerns this pass
        with runner.current_run.logs.throughput.paused():
            yield
        self.ends_stage = self.ends_stage or runner.need_early_stop
        outer.restore(runner)

    def _check_batch_size(self, runner: IRunner) -> None:
        """Warn, once per loader, if the number of samples counted in its first batch looks wrong.

        A size set by `handle_batch` is not checked.
        """
        key, size, stage = runner.loader_key, runner.batch_size, runner.current_run.stage
        batch, self.first_batch = self.first_batch, None
        if key in stage.checked_batch_sizes:
            return
        stage.checked_batch_sizes.add(key)
        if size != batch_size.batch_size_of(batch):
            return
        expected, is_only = LoaderMembers(runner.loader).batch_size, (runner.loader_batch_len or 0) <= 1
        share, given_by = share_of(runner.loader), "the loader's batch_size is"
        if expected is None and share.shares_whole_batches and share.knows_sizes and not self.num_skipped:
            sizes, is_only = share.sizes_of(0) or [], False
            expected, given_by = sizes[runner.engine.data_parallel.rank] or None, "its batch sampler gave"
        reason, is_wrong = batch_size.doubt_of(batch, size, expected=expected, is_only=is_only, given_by=given_by)
        if is_wrong:
            stage.miscounted.add(key)
            self.gradient_step.own_size = None
        if reason and runner.engine.is_main_process:
            batch_size.warn(key, size, reason)

    def _check_not_empty(self, runner: IRunner, *, num_samples: int | None = None) -> None:
        """Raise if this process got no batch of a training loader, or no process got one of another loader.

        Args:
            num_samples: the number that all processes saw, if already counted.
        Raises:
            ValueError: with the loader's key.
        """
        num_processes = runner.engine.num_processes
        needs_batch = runner.is_train_loader or num_processes == 1
        if num_samples == 0 or (needs_batch and runner.loader_batch_step == 0):
            why = checks.why_empty(runner.loader, num_processes=num_processes)
            raise ValueError(f"loader {runner.loader_key!r} gave no batch: {why}")


def is_training(key: str, stage: str) -> bool:
    """Return whether a stage trains on the loader `key`."""
    return key.startswith("train") and not stage.startswith("infer")
