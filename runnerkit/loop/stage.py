"""What the loop needs around it: components made for a stage, a loader entered and left, a batch counted."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runnerkit import batch_size, before_training, run_logs, snapshot, step_watch
from runnerkit.callback import EVENTS, CallbackNode, ICallback, ICheckpointCallback, innermost
from runnerkit.determinism import deterministic_algorithms
from runnerkit.loader_metrics import new_means, reduce_metrics
from runnerkit.logger import ILogger, Step
from runnerkit.sampling.sharding import count_batches, start_epoch
from runnerkit.seeding import derive_seed, set_global_seed
from runnerkit.storage.logdir_lock import lock
from runnerkit.types import Batch, as_dict, like
from runnerkit.whereabouts import note_whereabouts

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

log = logging.getLogger(__name__)

Listeners = dict[str, tuple[Callable[[Any], None], ...]]

EXCEPTION_HOOKS_S = 60.0  # for each hook of on_exception, if other processes wait

# What a loader in the middle of another one (valid_every_steps) must leave as it was.
_LOADER_STATE = (
    "loader_key", "loader", "is_train_loader", "is_valid_loader", "is_infer_loader", "loader_batch_step",
    "loader_sample_step", "loader_batch_len", "batch", "batch_size", "batch_metrics", "loader_metrics", "_means",
    "need_early_stop", "is_within_loader", "_ends_stage", "_skipped_batches",
)  # fmt: skip


def bind_listeners(runner: IRunner, callbacks: Iterable[ICallback] = ()) -> Listeners:
    """Work out once who acts on which event; an event that nobody overrides costs nothing."""
    acting = active(runner, callbacks)
    listeners = {}
    for event in EVENTS:
        bound = [getattr(each, event) for each in acting if each.listens_to(event)]
        if runner.listens_to(event):
            bound.insert(0 if event.endswith("_start") else len(bound), getattr(runner, event))
        listeners[event] = tuple(bound)
    return listeners


def active(runner: IRunner, callbacks: Iterable[ICallback]) -> list[ICallback]:
    """Those that run in this process, in order."""
    rank = runner.engine.rank if runner.engine is not None else 0
    return sorted((each for each in callbacks if CallbackNode(each.node).includes(rank)), key=lambda each: each.order)


@contextmanager
def experiment(runner: IRunner) -> Iterator[None]:
    """Open this process's device and group, and seed it; afterwards close the logs, whatever happened."""
    try:
        runner.engine.setup()
        runner._autocast = runner.engine.autocast()
        runner._listeners = bind_listeners(runner)
        before_training.warn_of_misspelt(runner, [runner])
        set_global_seed(runner.seed)
        runner._early_logs = [] if runner.engine.is_main_process else None
        with ExitStack() as modes:
            if runner.deterministic:
                modes.enter_context(deterministic_algorithms(runner.engine))
            if runner.detect_anomaly:
                modes.enter_context(torch.autograd.set_detect_anomaly(True))
            yield
    except BaseException as error:
        runner.exception = error
        note_whereabouts(runner, error)
        runner.engine.record_failure(error)  # first, as hooks of the user's may hang
        _tell_of_exception(runner, error)
        raise
    finally:
        close_experiment(runner)


def _tell_of_exception(runner: IRunner, error: BaseException) -> None:
    """Let all hear of it, those of stages before too; one that fails keeps no other from it, and does not hide it."""
    for listener in bind_listeners(runner, runner._known_callbacks)["on_exception"]:
        try:
            with _deadline(runner, error, _name_of(listener)):
                listener(runner)
        except Exception as another:
            error.add_note(f"{_name_of(listener)} raised {another!r}")
            log.error("%s failed", _name_of(listener), exc_info=another)


@contextmanager
def _deadline(runner: IRunner, error: BaseException, name: str) -> Iterator[None]:
    """End this process if the body takes too long and others wait for it."""

    def end() -> None:
        error.add_note(f"{name} did not end within {EXCEPTION_HOOKS_S:g} s, so its process was ended")
        runner.engine.record_failure(error)
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(EXCEPTION_HOOKS_S, end)
    timer.daemon = True
    if runner.engine.num_processes > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _name_of(method: Callable[..., Any]) -> str:
    return f"{type(getattr(method, '__self__', None)).__name__}.{method.__name__}"


def end_experiment(runner: IRunner) -> None:
    """Leave the last stage, and tell the callbacks of every stage."""
    leave_stage(runner)
    runner._listeners = bind_listeners(runner, runner._known_callbacks)
    runner._emit("on_experiment_end")


def close_experiment(runner: IRunner) -> None:
    """Close the logs, whatever happened; leave the model as the user gave it."""
    with ExitStack() as closing:  # one that fails does not keep the others open
        for unlock in runner._logdirs.values():
            closing.callback(unlock)  # last, when nothing is written any more
        closing.callback(leave_stage, runner)
        closing.callback(run_logs.close_logs, runner)
        closing.callback(step_watch.close, runner)


def setup_stage(runner: IRunner, stage: str) -> bool:
    """Make the stage's components, checked; False if the run resumes in a later stage."""
    leave_stage(runner)
    runner.stage_key = stage
    runner.stage_epoch_len = runner._hooks.get_stage_len(stage)
    runner.stage_epoch_step = runner.stage_batch_step = runner.stage_sample_step = 0
    runner.need_early_stop = False
    _make_loaders(runner, stage)
    _make_model(runner, stage)
    runner.callbacks = dict(runner._hooks.get_callbacks(stage))
    before_training.check_callbacks(runner.callbacks, runner.loaders)
    _claim_logdirs(runner, map(innermost, runner.callbacks.values()))  # before anything there is read
    if not snapshot.find(runner, stage):
        return False
    # Components were made alike on all ranks; what is drawn from now on (dropout, augmentation) differs.
    if runner.engine.rank:
        set_global_seed(derive_seed(runner.seed, "rank", runner.engine.rank))
    new = [each for each in runner.callbacks.values() if not any(each is known for known in runner._known_callbacks)]
    before_training.warn_of_misspelt(runner, map(innermost, new))
    for callback in active(runner, new):
        runner._known_callbacks.append(callback)
        callback.on_experiment_start(runner)
    runner._listeners = bind_listeners(runner, runner.callbacks.values())
    runner._step_watch = step_watch.watch_of_stage(runner)
    return True


def _claim_logdirs(runner: IRunner, writers: Iterable[Any]) -> None:
    """Keep other runs out of the folders that `writers` write to, until this one ends."""
    for writer in writers:
        if runner.engine.is_main_process and isinstance(writer, ICheckpointCallback | ILogger) and writer.logdir:
            logdir = Path(writer.logdir).resolve()
            if logdir not in runner._logdirs:
                runner._logdirs[logdir] = lock(logdir)


def _make_loaders(runner: IRunner, stage: str) -> None:
    loaders = before_training.check_loaders(runner._hooks.get_loaders(stage))
    before_training.check_samplers(runner, loaders)
    runner.loaders = {
        key: runner.engine.prepare_loader(loader, key=key, training=_is_training(runner, key), seed=runner.seed)
        for key, loader in loaders.items()
    }
    before_training.check_shares(runner)


def _make_model(runner: IRunner, stage: str) -> None:
    engine = runner.engine
    model = runner._hooks.get_model(stage)
    runner.model = like(model, {key: engine.prepare_model(each) for key, each in as_dict(model).items()})
    runner.criterion = runner._hooks.get_criterion(stage)
    for criterion in as_dict(runner.criterion).values():
        if isinstance(criterion, nn.Module):
            criterion.to(engine.device)
    is_infer = stage.startswith("infer")
    runner.optimizer = None if is_infer else runner._hooks.get_optimizer(stage, runner.model)
    before_training.check_optimizer(runner.optimizer, runner.model, runner.criterion)
    before_training.check_criterion(runner.criterion, engine)
    bare = as_dict(runner.optimizer)
    models, optimizers = engine.prepare(as_dict(runner.model), bare)
    runner._training_model, runner.optimizer = like(model, models), like(runner.optimizer, optimizers)
    runner.scheduler = None if is_infer else runner._hooks.get_scheduler(stage, runner.optimizer)
    _bind_schedulers(runner, {id(each): optimizers[key] for key, each in bare.items()})
    for optimizer in optimizers.values():
        engine.precision.watch(optimizer)


def _bind_schedulers(runner: IRunner, prepared: dict[int, Any]) -> None:
    """Let schedulers that were made for an optimizer act on the one that the engine made of it."""
    schedulers = list(as_dict(runner.scheduler).values())
    for scheduler in schedulers:  # and those inside: torch's SequentialLR and ChainedScheduler, WarmupLR
        schedulers += getattr(scheduler, "_schedulers", ())
        optimizer = getattr(scheduler, "optimizer", None)
        if id(optimizer) in prepared and prepared[id(optimizer)] is not optimizer:
            scheduler.optimizer = prepared[id(optimizer)]


def open_loggers(runner: IRunner) -> None:
    """Open the loggers, once, on rank zero; after all that could be refused was."""
    if runner._is_open:
        return
    runner._is_open = True
    if not runner.engine.is_main_process:
        return
    snapshot.leave_branch(runner)
    runner.loggers = dict(runner._hooks.get_loggers())
    run_logs.check_loggers(runner.loggers)
    _claim_logdirs(runner, runner.loggers.values())
    resumed_at = (runner._snapshot.step if runner._snapshot else Step("", "", 0, 0)) if runner._continues else None
    run_logs.set_up(runner, resumed_at=resumed_at)


def setup_loader(runner: IRunner, key: str) -> None:
    """Enter a loader: its order, the model's mode, empty sums."""
    loader = runner.loaders[key]
    runner.loader_key, runner.loader = key, loader
    runner.is_train_loader = _is_training(runner, key)
    runner.is_infer_loader = key.startswith("infer") or runner.stage_key.startswith("infer")
    runner.is_valid_loader = not runner.is_train_loader and not runner.is_infer_loader
    runner.loader_batch_step = runner.loader_sample_step = 0
    runner.loader_metrics = {}
    # Within the loader the flag is the loader's own; what was wanted before it is kept for after it.
    runner._ends_stage, runner.need_early_stop = runner.need_early_stop, False
    runner._means = new_means(runner)
    start_epoch(loader, runner.epoch_step)
    snapshot.enter_loader(runner)
    num_batches = count_batches(loader)
    runner.loader_batch_len = num_batches + runner.loader_batch_step if num_batches is not None else None
    runner.is_within_loader = True
    _use_model(runner)
    if runner.is_train_loader:
        step_watch.enter_loader(runner)
        before = runner.batch_step - runner.loader_batch_step
        runner.engine.enter_training_loader(lambda: runner.batch_step - before)


def _is_training(runner: IRunner, key: str) -> bool:
    return key.startswith("train") and not runner.stage_key.startswith("infer")


def _use_model(runner: IRunner) -> None:
    choose = runner.engine.training_model if runner.is_train_loader else runner.engine.evaluation_model
    models = {key: choose(model) for key, model in as_dict(runner._training_model).items()}
    for model in models.values():
        model.train(runner.is_train_loader)
    runner.model = like(runner._training_model, models)


def leave_stage(runner: IRunner) -> None:
    """Take back what the engine wrapped: the user's model and optimizer."""
    if runner._training_model is None:
        return
    trained, runner._training_model = runner._training_model, None
    if runner.exception is not None:  # no collectives now
        runner.model = like(trained, {key: runner.engine.unwrap(each) for key, each in as_dict(trained).items()})
        return
    bare = as_dict(runner.optimizer)
    models, optimizers = runner.engine.release(as_dict(trained), bare)
    _bind_schedulers(runner, {id(each): optimizers[key] for key, each in bare.items()})
    runner.model, runner.optimizer = like(trained, models), like(runner.optimizer, optimizers)


def start_batch(runner: IRunner, batch: Batch) -> None:
    """Count a batch and make it the runner's."""
    size = batch_size.batch_size_of(batch)
    num_samples = size * runner.engine.num_processes
    runner.batch, runner.batch_size, runner.batch_metrics = batch, size, {}
    runner.loader_batch_step += 1
    runner.loader_sample_step += num_samples
    if runner.is_train_loader:
        runner.batch_step += 1
        runner.sample_step += num_samples
        runner.stage_batch_step += 1
        runner.stage_sample_step += num_samples


def finish_batch(runner: IRunner) -> None:
    """Add a batch's metrics to the loader's; of every `log_every`-th training step, queue them for the loggers."""
    if runner.loader_batch_step == 1:
        batch_size.check(runner)
    runner._means.update(runner.batch_metrics, runner.batch_size, batch_step=runner.loader_batch_step)
    if runner._wants_batch_metrics and runner.is_train_loader and runner.batch_step % runner.log_every == 0:
        run_logs.hand_over_steps(runner)  # those of the time before, long computed by now
        runner._step_queue.put(runner.step, runner.batch_metrics)


def finish_loader(runner: IRunner, key: str) -> None:
    """Leave a loader: one reduction over processes, then callbacks, then the loggers."""
    runner.need_early_stop = runner._ends_stage
    runner.is_within_loader = False
    before_training.check_not_empty(runner)
    if runner.is_train_loader:
        step_watch.leave_loader(runner)
        runner.engine.leave_training_loader(runner.loader_batch_step, key=key)
    num_samples = reduce_metrics(runner)
    before_training.check_not_empty(runner, num_samples=num_samples)
    _count_exactly(runner, num_samples)
    runner._emit("on_loader_end")
    if not runner.is_train_loader:
        for model in as_dict(runner._training_model).values():
            runner.engine.training_model(model)  # evaluation is over, whatever comes next
    runner.loader_metrics = {name: float(value) for name, value in runner.loader_metrics.items()}
    runner.epoch_metrics[key] = dict(runner.loader_metrics)
    run_logs.tell_metrics(runner, runner.loader_metrics)
    run_logs.flush_logs(runner)


def _count_exactly(runner: IRunner, num_samples: int) -> None:
    # Until here each process took the others' batches to be as large as its own.
    surplus = runner.loader_sample_step - num_samples
    runner.loader_sample_step -= surplus
    if runner.is_train_loader:
        runner.sample_step -= surplus
        runner.stage_sample_step -= surplus


def pause_loader(runner: IRunner) -> dict[str, Any]:
    """Remember the loader under way."""
    return {name: getattr(runner, name) for name in _LOADER_STATE}


def continue_loader(runner: IRunner, paused: dict[str, Any]) -> None:
    """Go on with a loader that was paused."""
    ends_stage = runner.need_early_stop
    vars(runner).update(paused)
    runner._ends_stage = runner._ends_stage or ends_stage
    _use_model(runner)
