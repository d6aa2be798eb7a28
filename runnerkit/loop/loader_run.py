"""One pass over one loader: the model's mode, batches and their counters, and the reduction of its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from runnerkit.loop import batch_size, checks, parameter_checks
from runnerkit.loop.attributes import LoaderAttributes, ProcessState
from runnerkit.loop.loader_metrics import check_means, new_means, reduce_metrics
from runnerkit.loop.position import Position
from runnerkit.metrics.means import LoaderMeans
from runnerkit.resume import resume_point
from runnerkit.sampling.sharding import batches_of, count_batches, gives_new_batches, is_length_sure, start_epoch
from runnerkit.steps import learning, step_watch
from runnerkit.steps.budget import is_over, limit_pass
from runnerkit.steps.gradient_step import GradientStep
from runnerkit.steps.learning_rates import rates_of_all
from runnerkit.support.device_move import copied
from runnerkit.support.host_copy import as_number
from runnerkit.types import Batch, as_dict, like

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


_END = object()


class LoaderRun(ProcessState):
    """State of the pass under way, in addition to the runner's public attributes.

    Attributes:
        position: the run's, in all of its passes.
        means: the batch metrics of this process, kept as weighted sums until the loader ends.
        ends_stage: whether the stage ends after this epoch; within a loader, `need_early_stop` concerns that loader.
        num_skipped: batches that ran before the run was interrupted.
        num_processes: among which the loader's data is divided.
        first_batch: of the pass, as the loader gave it, until its number of samples was checked.
        weightless: metrics of the last pass that are NaN because no batch weighs anything.
    """

    def __init__(self) -> None:
        self.position = Position()
        self.means = LoaderMeans()
        self.ends_stage = False
        self.num_skipped = 0
        self.num_processes = 1
        self.first_batch: Batch = None
        self.weightless: frozenset[str] = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()  # a copy of a runner starts its own pass

    @contextmanager
    def nested(self, runner: IRunner) -> Iterator[None]:
        """Let other passes run within this one, and return to it afterwards.

        After an exception nothing is restored: the runner shows where it failed.
        """
        attributes, mine = LoaderAttributes.of(runner), dict(vars(self))
        runner.need_early_stop = False  # it concerns the pass outside
        yield
        ends_stage = runner.need_early_stop
        attributes.restore(runner)
        vars(self).update(mine)
        self.ends_stage = self.ends_stage or ends_stage


def setup_loader(runner: IRunner, key: str) -> None:
    """Start a pass: the order of its samples, the model's mode and empty sums."""
    loader = runner.loaders[key]
    runner.loader_key, runner.loader = key, loader
    runner.is_train_loader = is_training(runner, key)
    runner.is_infer_loader = key.startswith("infer") or runner.stage_key.startswith("infer")
    runner.is_valid_loader = not runner.is_train_loader and not runner.is_infer_loader
    runner.loader_batch_step = runner.loader_sample_step = 0
    runner.loader_metrics = {}
    run = runner._loader_run
    run.ends_stage, runner.need_early_stop = runner.need_early_stop, False
    run.means, run.num_processes = new_means(runner), runner.engine.data_parallel.num_processes
    start_epoch(loader, runner.epoch_step)
    run.num_skipped = resume_point.setup_position(runner)
    if runner.is_train_loader:
        limit_pass(runner)
    num_batches = count_batches(loader)
    runner.loader_batch_len = num_batches + runner.loader_batch_step if num_batches is not None else None
    runner.is_within_loader = True
    use_model(runner)
    runner.gradient_step = GradientStep.of_pass(runner, num_before=run.num_skipped)
    if runner.is_train_loader:
        step_watch.start_watch(runner)
        before = runner.batch_step - runner.loader_batch_step
        runner.engine.enter_training_loader(lambda: runner.batch_step - before)


def is_training(runner: IRunner, key: str) -> bool:
    """Return whether the loader with this key is for training."""
    return key.startswith("train") and not runner.stage_key.startswith("infer")


def is_left(runner: IRunner, key: str) -> bool:
    """Return whether a loader of the epoch is still to run; an evaluation within it may have been at its last step."""
    if is_training(runner, key):
        return not is_over(runner)
    return not runner._loader_run.position.is_validated(runner)


def use_model(runner: IRunner) -> None:
    """Give the runner the model that its loader needs, in the mode that the loader needs."""
    trained = runner._stage.training_model
    if not runner.is_train_loader:
        runner._stage.evaluation_weights.eval()  # before an engine gathers them
    choose = runner.engine.training_model if runner.is_train_loader else runner.engine.evaluation_model
    models = {key: choose(model) for key, model in as_dict(trained).items()}
    if runner.is_train_loader:
        enter_training(runner)
    else:
        for modes in runner._stage.training_modes.values():
            modes.leave()
        for model in models.values():
            model.eval()
    runner.model = like(trained, models)


def enter_training(runner: IRunner) -> None:
    """Give the models the weights, and put them into the modes, that they have in training."""
    runner._stage.evaluation_weights.train()
    for modes in runner._stage.training_modes.values():
        modes.enter()


def batches(runner: IRunner) -> Iterator[Batch]:
    """Yield the loader's batches on the device; an error while one is fetched counts as that batch's."""
    was_ended = runner.need_early_stop and runner._loader_run.num_skipped  # before the run was interrupted
    if was_ended or (runner.is_train_loader and is_over(runner)):
        resume_point.restore_rng(runner)
        return
    if runner.is_train_loader:
        parameter_checks.check_added(runner)
    if getattr(runner.loader, "num_workers", 0):
        runner.engine.settle()
    iterator = batches_of(runner.loader)
    resume_point.restore_rng(runner)  # after iter(), which draws the workers' seed
    try:
        if runner.engine.num_processes > 1:
            iterator = checks.compare_streams(runner, iterator)
        length, accumulates = runner.loader_batch_len, runner.gradient_step.accumulate
        is_doubtful = length is not None and runner.is_train_loader and not is_length_sure(runner.loader)
        if is_doubtful or (length is None and accumulates):
            iterator = _with_its_end_known(runner, iterator, looks_ahead=accumulates)
        for batch in iterator:
            yield runner.engine.to_device(batch)
        if is_doubtful and length != runner.loader_batch_step:
            checks.warn_of_length(runner, length)
    except Exception:
        runner.loader_batch_step, runner.batch = runner.loader_batch_step + 1, None  # the missing one
        raise


def _with_its_end_known(runner: IRunner, batches: Iterator[Batch], *, looks_ahead: bool) -> Iterator[Batch]:
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


def start_batch(runner: IRunner, batch: Batch) -> None:
    """Count a batch and make it the runner's current one."""
    size = batch_size.batch_size_of(batch)
    runner.batch, runner.batch_size, runner.batch_weight, runner.batch_metrics = batch, size, None, {}
    runner.loader_batch_step += 1
    run, step = runner._loader_run, runner.gradient_step
    if runner.loader_batch_step == 1:
        run.first_batch = batch
    num_samples = step.num_samples or size * run.num_processes
    if runner.loader_batch_step >= step.first_uneven:
        num_samples = step.begin_batch(runner, number=runner.loader_batch_step - 1 - run.num_skipped) or num_samples
        if step.is_idle:
            from runnerkit.steps.odd_batches import begin_idle_step  # late, as few runs need it

            begin_idle_step(runner, step)
    runner.loader_sample_step += num_samples
    if runner.is_train_loader:
        run.position.count_batch(runner, num_samples)


def finish_batch(runner: IRunner) -> None:
    """Add a batch's metrics to the loader's sums; queue those of every `log_every`-th training step for the loggers."""
    if runner.loader_batch_step == 1:
        batch_size.check(runner)
        checks.check_order_is_used(runner)
        runner.gradient_step.check(runner)
    run, step = runner._loader_run, runner.gradient_step
    if runner.is_train_loader and not step.has_steppers:
        learning.finish_batch(runner)
    if step.is_idle:
        from runnerkit.steps.odd_batches import end_idle_step  # late, as few runs need it

        end_idle_step(step)
    else:
        if step.own_size is not None and runner.batch_size != step.own_size:
            from runnerkit.steps.odd_batches import warn_of_dropped_samples  # late, as few runs need it

            warn_of_dropped_samples(runner, step)
        run.means.update(
            runner.batch_metrics, runner.batch_size, weight=runner.batch_weight, batch_step=runner.loader_batch_step
        )
    logs = runner._logs
    is_step = runner.is_train_loader and step.stepped_at == runner.batch_step
    if logs.wants_batch_metrics and is_step and runner.optimizer_step % runner.log_every < step.num_steps:
        logs.hand_over_steps(runner)  # earlier ones, long computed by now
        rates = rates_of_all(runner.optimizer)
        logs.queue.put(runner.step, {**runner.batch_metrics, **rates, **runner.batch_metrics})  # the user's "lr" stays


def finish_loader(runner: IRunner, key: str) -> None:
    """End a pass: one reduction over processes, then the callbacks, then the loggers; every rank must call."""
    runner.need_early_stop = runner._loader_run.ends_stage
    runner.is_within_loader = False
    runner.batch_weight = None
    checks.check_not_empty(runner)
    runner.gradient_step.end_pass(runner)
    if runner.is_train_loader:
        step_watch.end_watch(runner)
        runner.engine.leave_training_loader(runner.loader_batch_step, key=key)
    num_samples = reduce_metrics(runner)
    checks.check_not_empty(runner, num_samples=num_samples)
    # Until here each process assumed that the others' batches are as large as its own.
    surplus, runner.loader_sample_step = runner.loader_sample_step - num_samples, num_samples
    if runner.is_train_loader:
        runner._loader_run.position.correct_samples(runner, surplus)
        check_means(runner)
        learning.check_losses(runner)
    runner._stage.listeners.emit("on_loader_end", runner)
    if not runner.is_train_loader:
        for model in as_dict(runner._stage.training_model).values():
            runner.engine.training_model(model)  # evaluation is over, whatever comes next
    runner.loader_metrics = {name: as_number(name, value) for name, value in runner.loader_metrics.items()}
    runner._loader_run.position.end_loader(runner, key)
    runner._logs.log_metrics(runner, runner.loader_metrics)
    runner._logs.flush(runner)
