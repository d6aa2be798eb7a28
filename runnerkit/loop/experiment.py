"""The outermost part of a run: devices and generators are set up, failures are recorded, logs are closed."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from runnerkit.loop import checks
from runnerkit.loop.determinism import deterministic_algorithms
from runnerkit.loop.error_context import add_context
from runnerkit.loop.listeners import Listeners
from runnerkit.sampling.sharding import share_of
from runnerkit.seeding.generators import set_global_seed

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

log = logging.getLogger(__name__)

EXCEPTION_HOOKS_S = 60.0  # for each on_exception hook, if other processes wait


@contextmanager
def experiment(runner: IRunner) -> Iterator[None]:
    """Set up the device and the process group and seed this process; on exit, close the logs even after an error."""
    run = runner.current_run
    try:
        runner.engine.setup()
        runner.engine.check_communicator()
        runner.engine.in_use = True
        run.stage.autocast = runner.engine.autocast()
        run.stage.listeners.bind(runner)
        checks.warn_of_misspelt(runner, [runner])
        set_global_seed(runner.seed)
        if runner.engine.is_main_process:
            run.logs.collect_early()
        with ExitStack() as modes:
            if runner.deterministic:
                modes.enter_context(deterministic_algorithms(runner.engine))
            if runner.detect_anomaly:
                modes.enter_context(torch.autograd.set_detect_anomaly(True))
            yield
    except BaseException as error:
        runner.exception = error
        add_context(runner, error)
        runner.engine.record_failure(error)  # before the user's hooks, which may hang
        _emit_exception(runner, error)
        raise
    finally:
        runner.engine.in_use = False
        _close(runner)


def _close(runner: IRunner) -> None:
    stage, logs = runner.current_run.stage, runner.current_run.logs
    with ExitStack() as closing:  # a failure does not keep the others open
        closing.callback(stage.listeners.release)
        closing.callback(logs.unlock, runner)  # last, when nothing is written anymore
        closing.push(partial(_close_status, runner))
        closing.callback(stage.close, runner)
        closing.callback(logs.close, runner)
        if stage.step_watch is not None:
            closing.callback(stage.step_watch.leave, runner)
        for loader in runner.loaders.values():
            closing.callback(share_of(loader).close)


def _close_status(runner: IRunner, _: object, error: BaseException | None, __: object) -> None:
    """Write how the run ended, given an error of what was closed before."""
    runner.current_run.status.close(runner, runner.exception or error)


def _emit_exception(runner: IRunner, error: BaseException) -> None:
    """Call every ``on_exception`` hook, also those of earlier stages; a hook that fails does not hide `error`."""
    listeners = Listeners()
    listeners.bind(runner, runner.current_run.stage.known_callbacks)
    for listener in listeners["on_exception"]:
        try:
            with _deadline(runner, error, _name_of(listener)):
                listener(runner)
        except Exception as another:
            error.add_note(f"{_name_of(listener)} raised {another!r}")
            log.error("%s failed", _name_of(listener), exc_info=another)


@contextmanager
def _deadline(runner: IRunner, error: BaseException, name: str) -> Iterator[None]:
    """End this process if the body takes too long and other processes wait for it."""

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
    owner = method.__self__ if isinstance(method, MethodType) else None
    return f"{type(owner).__name__}.{method.__name__}"
