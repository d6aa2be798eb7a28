"""Everything a run logs, sent to all of its loggers; a logger that fails is removed unless it is essential."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.callback import ICheckpointCallback
from runnerkit.errors import UnknownKeyError, did_you_mean
from runnerkit.logger import ILogger, Scope, Step, StepQueue, takes
from runnerkit.loop.attributes import ProcessState
from runnerkit.loop.environment import describe_environment
from runnerkit.loop.recorded_settings import precision_of, recorded_settings
from runnerkit.loop.stop_signals import handling_stop_signals
from runnerkit.loop.throughput import Throughput, with_throughput, without_throughput
from runnerkit.steps.learning_rates import rates_of_all
from runnerkit.storage import claims
from runnerkit.storage.remote.urls import shown, url_of
from runnerkit.support.redaction import redacted

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

log = logging.getLogger(__name__)

# Errors of a logger's setup() that the user can fix before training starts. Any other error comes from a service that
# is down or a disk that fails.
_WRONG_USE = (
    ValueError, TypeError, LookupError, AttributeError, NameError, ImportError, FileExistsError,
)  # fmt: skip

_DEFAULT_KEYS = ("console", "csv", "tensorboard")  # of the loggers that `train` adds


class RunLogs(ProcessState):
    """Connection of a run to its loggers, ``runner.loggers``, which are open on rank zero only.

    Attributes:
        is_open: whether the loggers have been set up.
        wants_batch_metrics: whether a logger takes the metrics of training steps.
        wants_throughput: whether one of them takes, or took before it failed, the throughput too.
        queue: metrics of training steps, on the device, not yet sent to the loggers.
        throughput: of the training since the last logged step.
        more_hparams: hyperparameters added by ``log_hparams``.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.wants_batch_metrics = self.wants_throughput = False
        self.queue = StepQueue()
        self.throughput = Throughput()
        self.more_hparams: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._early_notices: list[str] = []
        self._early: list[tuple[str, str, Any, Step]] | None = None  # logged before the loggers are open
        self._locked: dict[Path, Callable[[], None]] = {}  # logdirs of this run, and how to release them

    def claim(self, runner: IRunner, writers: Iterable[Any]) -> None:
        """Keep other runs out of the folders that `writers` write to, until this one ends."""
        for writer in writers if runner.engine.is_main_process else ():
            logdir = getattr(writer, "logdir", None)
            is_stored = isinstance(logdir, Path) and url_of(logdir) is not None  # also of callbacks that export
            if logdir is not None and (is_stored or isinstance(writer, ICheckpointCallback | ILogger)):
                logdir = Path(logdir).resolve()
                if logdir not in self._locked:
                    self._locked[logdir] = claims.claim(logdir, num_processes=runner.engine.num_processes)

    @property
    def logdirs(self) -> list[Path]:
        """The folders that no other run may use."""
        return list(self._locked)

    def unlock(self, runner: IRunner) -> None:
        """Release the folders, when everything is in the store if one is in a store."""
        with ExitStack() as closing:
            for release in self._locked.values():
                closing.callback(_release, release, runner.exception)

    def collect_early(self) -> None:
        """Keep what is logged from now on until the loggers are open."""
        self._early = []

    def open(self, runner: IRunner, loggers: Mapping[str, ILogger | None], *, resumed_at: Step | None) -> None:
        """Open the loggers; send the hyperparameters and what was logged before.

        Args:
            resumed_at: where the run continues with what its logdir holds; None if it does not.
        """
        check_loggers(loggers)
        runner.loggers = {key: each for key, each in loggers.items() if each is not None}
        self.claim(runner, runner.loggers.values())
        for key, logger in list(runner.loggers.items()):
            try:
                logger.setup(resumed_at=resumed_at)
            except _WRONG_USE:
                raise
            except Exception as error:
                self._remove(runner, key, error)
        self.log_hparams(runner)
        early, self._early = self._early or [], None
        for method, tag, value, step in early:
            if not runner.current_run.resume_point.has_logged(runner.stage_key):
                self._send(runner, method, tag, value, step=step, scope="loader")
        steps = [logger for logger in runner.loggers.values() if logger.log_batch_metrics]
        self.wants_batch_metrics = bool(steps)
        self.wants_throughput = any(logger.log_throughput for logger in steps)
        if runner.current_run.given_hooks is None:  # a run, not an evaluation
            self.notice(runner, self._describe_start(runner))
        while self._early_notices:
            self.notice(runner, self._early_notices.pop(0))

    def _describe_start(self, runner: IRunner) -> str:
        engine, folders = runner.engine, ", ".join(map(_short, self.logdirs))
        precision = precision_of(runner.current_run.stage.autocast) or type(engine.precision).__name__.lower()
        processes = "1 process" if engine.num_processes == 1 else f"{engine.num_processes} processes"
        words = f"started: {type(engine).__name__}, {processes}, {precision}, {engine.device}"
        return f"{words}; logs in {folders}" if folders else words

    @contextmanager
    def paused(self, runner: IRunner) -> Iterator[None]:
        """Log nothing in the body: the user's code logs to the runner, whichever pass it runs in."""
        loggers, early = runner.loggers, self._early
        runner.loggers, self._early = {}, None
        yield
        runner.loggers, self._early = loggers, early

    def log_hparams(self, runner: IRunner) -> None:
        """Send the loggers all hyperparameters known so far."""
        if takes(runner.loggers, "log_hparams"):
            self._settings = self._settings or recorded_settings(runner)  # of the first stage
            environment = describe_environment(runner.engine, seed=runner.seed) | {"settings": self._settings}
            hparams = redacted({**runner.hparams, **self.more_hparams})
            self._send(runner, "log_hparams", hparams, environment=environment)

    def log_metrics(self, runner: IRunner, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a pass over a loader, after those of the training steps before it."""
        self.hand_over_steps(runner)
        for key, logger in list(runner.loggers.items()):
            if logger.log_epoch_metrics:
                self._call(runner, key, logger, "log_scalars", metrics, step=runner.step, scope="loader")

    def queue_step(self, runner: IRunner) -> None:
        """Queue a training step's metrics and learning rates, and log those before it, long computed by now."""
        self.hand_over_steps(runner)
        factors = runner.current_run.stage.rate_factors
        metrics, rates = runner.batch_metrics, rates_of_all(runner.optimizer, factors)
        speed = self.throughput.take(runner) if self.wants_throughput else {}
        # Metrics twice: to come first, and so that a "lr" of the user's stays.
        self.queue.put(runner.step, {**metrics, **rates, **metrics, **speed})

    def hand_over_steps(self, runner: IRunner) -> None:
        """Log the training steps in the queue."""
        steps = full = self.queue.take()
        if self.wants_throughput:
            steps = [(step, without_throughput(metrics)) for step, metrics in full]
            full = [(step, with_throughput(metrics)) for step, metrics in full]
        for key, logger in list(runner.loggers.items()):
            if logger.log_batch_metrics:
                try:  # without _call, as each function call counts here
                    for step, metrics in full if logger.log_throughput else steps:
                        logger.log_scalars(metrics, step=step, scope="batch")
                except Exception as error:
                    self._remove(runner, key, error)

    def flush(self, runner: IRunner) -> None:
        """Write what was logged to the disk, for example before a checkpoint, which must not be ahead of the logs."""
        self.hand_over_steps(runner)
        self._send(runner, "flush")
        for logdir in self._locked:
            claims.flush(logdir)

    def notice(self, runner: IRunner, text: str) -> None:
        """Show one line about the run on the console, or else log it as INFO, once the loggers are open."""
        if not runner.engine.is_main_process:
            return
        if not self.is_open:
            self._early_notices.append(text)
        elif takes(runner.loggers, "log_notice"):
            self._send(runner, "log_notice", text)
        else:
            log.info("%s", text)

    def log_media(self, runner: IRunner, method: str, tag: str, make: Callable[..., Any], *args: Any) -> None:
        """Log what `make` returns; it is not called if no logger has the method.

        Args:
            args: passed to `make`, which returns None if there is nothing to log.
        """
        if self._early is None and not takes(runner.loggers, method):
            return
        if not isinstance(tag, str) or not tag:
            raise TypeError(f"a tag is a name such as 'samples', got {tag!r}")
        value = make(*args)
        if value is None:
            return
        if self._early is not None:
            self._early.append((method, tag, value, runner.step))
            return
        self.hand_over_steps(runner)  # earlier ones, so that logs stay in the order of the run
        scope: Scope = "batch" if runner.is_within_loader and runner.is_train_loader else "loader"
        self._send(runner, method, tag, value, step=runner.step, scope=scope)

    def close(self, runner: IRunner) -> None:
        """Tell the loggers how the run ended and close them; a logger that fails does not keep the others open."""
        self._early = None
        with ExitStack() as closing:
            for key, logger in runner.loggers.items():
                closing.callback(_close, key, logger, runner.exception)
            if self.queue:  # after a failure: the steps right before it
                self._hand_over_last_steps(runner)
            runner.loggers = {}  # nothing is logged after the end

    def _hand_over_last_steps(self, runner: IRunner) -> None:
        engine, error = runner.engine, runner.exception
        if engine.num_processes > 1 and engine.device.type != "cpu":
            return  # copying from a GPU may wait forever behind a collective that other processes never enter
        try:
            self.hand_over_steps(runner)
        except Exception as another:
            if error is None:
                raise
            error.add_note(f"the last steps were not logged: {another!r}")  # the device failed

    def _send(self, runner: IRunner, method: str, *args: Any, **kwargs: Any) -> None:
        for key, logger in list(runner.loggers.items()):
            self._call(runner, key, logger, method, *args, **kwargs)

    def _call(self, runner: IRunner, key: str, logger: ILogger, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(logger, method)(*args, **kwargs)
        except Exception as error:
            self._remove(runner, key, error)

    def _remove(self, runner: IRunner, key: str, error: Exception) -> None:
        """Continue without a logger that failed, or raise its error if it is essential."""
        logger = runner.loggers[key]
        if logger.is_essential:
            raise error
        del runner.loggers[key]
        name = type(logger).__name__
        log.warning("logger %r (%s) failed; the run continues without it: %r", key, name, error, exc_info=error)
        self.wants_batch_metrics = any(each.log_batch_metrics for each in runner.loggers.values())
        try:
            logger.close()
        except Exception as another:  # its first error has been reported
            log.debug("logger %r did not close either: %r", key, another)


def _short(folder: Path) -> str:
    """Return what a user calls a folder: its URL, or its path from the working directory, if it is inside."""
    here = Path.cwd()
    is_inside = url_of(folder) is None and folder.is_relative_to(here)
    return str(folder.relative_to(here)) if is_inside else shown(folder)


def _release(release: Callable[[], None], error: BaseException | None) -> None:
    """Release a logdir; its failure is a note of the `error` that ended the run, if there is one."""
    asked: list[int] = []
    try:
        with handling_stop_signals(asked.append):  # the last checkpoint may be on its way to a store
            release()
    except Exception as another:
        if error is None:
            raise
        if another is not error:
            error.add_note(f"the logdir is not complete in the store: {another}")
    if asked and error is None:  # the run is over: the signal is for the script
        signal.raise_signal(asked[0])


def _close(key: str, logger: ILogger, error: BaseException | None) -> None:
    """Close a logger, whose failure is a note of the `error` that ended the run, if there is one."""
    name = type(logger).__name__
    try:
        try:
            logger.log_end(error)
        finally:
            logger.close()
    except Exception as another:
        if error is not None:
            error.add_note(f"{name}.close raised {another!r}")  # must not hide the first error
        elif logger.is_essential:
            raise
        log.warning("logger %r (%s) failed to close: %r", key, name, another, exc_info=another)


def check_loggers(loggers: Any) -> None:
    """Raise unless all values are loggers that write to different files; `None` disables a logger.

    Raises:
        TypeError, ValueError: with the logger's key.
    """
    if not isinstance(loggers, Mapping):
        raise TypeError(f"loggers must be a dict such as {{'mine': MyLogger()}}, got {type(loggers).__name__}")
    writers: dict[Any, str] = {}
    for key, each in loggers.items():
        if each is None:
            if key not in _DEFAULT_KEYS and (meant := did_you_mean(key, _DEFAULT_KEYS)):
                raise UnknownKeyError(f"loggers={{{key!r}: None}} disables no logger{meant}")
            continue
        if not isinstance(each, ILogger):
            if isinstance(each, type):
                raise TypeError(
                    f"logger {key!r} is the class {each.__name__}; pass an instance of it: {each.__name__}(...)"
                )
            raise TypeError(
                f"logger {key!r} is a {type(each).__name__}; pass a runnerkit ILogger, for example "
                "loggers={'wandb': dl.WandbLogger(logdir)}, or None to disable one"
            )
        if each.logdir is None or not type(each).__module__.startswith("runnerkit."):
            continue  # other classes manage their files themselves
        other = writers.setdefault((type(each), each.logdir), key)
        if other != key:
            raise ValueError(
                f"loggers {other!r} and {key!r} would overwrite each other's files in {each.logdir}: give one another "
                f"logdir, or the key {other!r} to replace the other"
            )
