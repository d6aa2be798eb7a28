"""What a run has to log goes to all its loggers; one that fails is left out from then on, unless it is essential."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from runnerkit.environment import describe_environment
from runnerkit.logger import ILogger, Scope, Step, takes
from runnerkit.redaction import redacted

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

log = logging.getLogger(__name__)

# What a logger's setup() raises for a wrong use, which the user can cure before anything is trained. Anything else is
# a service that is away, a disk that fails.
_WRONG_USE = (
    ValueError, TypeError, LookupError, AttributeError, NameError, ImportError, FileExistsError,
)  # fmt: skip


def check_loggers(loggers: Any) -> None:
    """Refuse loggers that are none, or that write over each other; None, which leaves one out, is let be.

    Raises:
        TypeError, ValueError: with the logger's key.
    """
    if not isinstance(loggers, Mapping):
        raise TypeError(f"loggers must be a dict such as {{'mine': MyLogger()}}, got {type(loggers).__name__}")
    writers: dict[Any, str] = {}
    for key, each in loggers.items():
        if each is None:
            continue
        if not isinstance(each, ILogger):
            if isinstance(each, type):
                raise TypeError(
                    f"logger {key!r} is the class {each.__name__}; pass an object of it: {each.__name__}(...)"
                )
            raise TypeError(
                f"logger {key!r} is a {type(each).__name__}; write loggers={{'wandb': dl.WandbLogger(logdir)}}, say, "
                "with the object itself: a runnerkit ILogger, or None to leave one out"
            )
        if each.logdir is None or not type(each).__module__.startswith("runnerkit."):
            continue  # which files others write there only they know
        other = writers.setdefault((type(each), each.logdir), key)
        if other != key:
            raise ValueError(
                f"loggers {other!r} and {key!r} would write over each other in {each.logdir}: give one a logdir of its "
                f"own, or the key {other!r} to replace the other"
            )


def set_up(runner: IRunner, *, resumed_at: Step | None) -> None:
    """Open the loggers, and tell them the hyperparameters, and what was logged before they were open."""
    for key, logger in list(runner.loggers.items()):
        try:
            logger.setup(resumed_at=resumed_at)
        except _WRONG_USE:
            raise
        except Exception as error:
            _leave_out(runner, key, error)
    tell_hparams(runner)
    early, runner._early_logs = runner._early_logs or [], None
    for method, tag, value, step in early:
        if runner._snapshot is None:  # else the run that is resumed logged it
            tell(runner, method, tag, value, step=step, scope="loader")
    runner._wants_batch_metrics = any(logger.log_batch_metrics for logger in runner.loggers.values())


def tell(runner: IRunner, method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of every logger."""
    for key, logger in list(runner.loggers.items()):
        _call(runner, key, logger, method, *args, **kwargs)


def _call(runner: IRunner, key: str, logger: ILogger, method: str, *args: Any, **kwargs: Any) -> None:
    try:
        getattr(logger, method)(*args, **kwargs)
    except Exception as error:
        _leave_out(runner, key, error)


def _leave_out(runner: IRunner, key: str, error: Exception) -> None:
    """Go on without a logger that failed, or raise what it raised."""
    logger = runner.loggers[key]
    if logger.is_essential:
        raise error
    del runner.loggers[key]
    name = type(logger).__name__
    log.warning("logger %r (%s) failed, and the run goes on without it: %r", key, name, error, exc_info=error)
    runner._wants_batch_metrics = any(each.log_batch_metrics for each in runner.loggers.values())
    try:
        logger.close()
    except Exception as another:  # it was warned of
        log.debug("logger %r did not close either: %r", key, another)


def tell_hparams(runner: IRunner) -> None:
    """Give the loggers all hyperparameters that there are by now."""
    if runner.loggers:
        environment = describe_environment(runner.engine, seed=runner.seed)
        tell(runner, "log_hparams", redacted({**runner.hparams, **runner._more_hparams}), environment=environment)


def tell_metrics(runner: IRunner, metrics: Mapping[str, float]) -> None:
    """Log a pass over a loader."""
    for key, logger in list(runner.loggers.items()):
        if logger.log_epoch_metrics:
            _call(runner, key, logger, "log_scalars", metrics, step=runner.step, scope="loader")


def hand_over_steps(runner: IRunner) -> None:
    """Log the training steps that are queued."""
    steps = runner._step_queue.take()
    for key, logger in list(runner.loggers.items()):
        if logger.log_batch_metrics:
            try:  # not by _call: here each call counts
                for step, metrics in steps:
                    logger.log_scalars(metrics, step=step, scope="batch")
            except Exception as error:
                _leave_out(runner, key, error)


def flush_logs(runner: IRunner) -> None:
    """Bring what was logged to the disk: before a checkpoint, which must not be ahead of the logs."""
    hand_over_steps(runner)
    tell(runner, "flush")


def log_media(runner: IRunner, method: str, tag: str, make: Callable[..., Any], *args: Any) -> None:
    """Log what `make` gives, if it gives something and a logger takes such things; else it is not called.

    Args:
        args: handed to `make`.
    """
    is_early = runner._early_logs is not None
    if not is_early and not takes(runner.loggers, method):
        return
    if not isinstance(tag, str) or not tag:
        raise TypeError(f"a tag is a name such as 'samples', got {tag!r}")
    value = make(*args)
    if value is None:
        return
    if runner._early_logs is not None:
        runner._early_logs.append((method, tag, value, runner.step))
        return
    hand_over_steps(runner)  # those of before, so that logs stay in the order of the run
    scope: Scope = "batch" if runner.is_within_loader and runner.is_train_loader else "loader"
    tell(runner, method, tag, value, step=runner.step, scope=scope)


def close_logs(runner: IRunner) -> None:
    """Tell the loggers how the run ended, and close them; one that fails does not keep the others open."""
    runner._early_logs = None
    with ExitStack() as closing:
        for key, logger in runner.loggers.items():
            closing.callback(_close, runner, key, logger)
        if runner._step_queue:  # a run that failed: the steps nearest to it
            _hand_over_last_steps(runner)
        runner.loggers = {}  # nothing is logged after the end


def _hand_over_last_steps(runner: IRunner) -> None:
    engine, error = runner.engine, runner.exception
    if engine.num_processes > 1 and engine.device.type != "cpu":
        return  # a GPU's numbers may wait for ever, behind a collective that others do not enter any more
    try:
        hand_over_steps(runner)
    except Exception as another:
        if error is None:
            raise
        error.add_note(f"the last steps were not logged: {another!r}")  # by a device that failed


def _close(runner: IRunner, key: str, logger: ILogger) -> None:
    error, name = runner.exception, type(logger).__name__
    try:
        try:
            logger.log_end(error)
        finally:
            logger.close()
    except Exception as another:
        if error is not None:
            error.add_note(f"{name}.close raised {another!r}")  # which must not hide what came before it
        elif logger.is_essential:
            raise
        log.warning("logger %r (%s) failed to close: %r", key, name, another, exc_info=another)
