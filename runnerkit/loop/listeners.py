"""The methods that act on each event of a run, in their order."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from runnerkit.callback import (
    EVENTS,
    CallbackNode,
    ICallback,
    ICheckpointCallback,
    IListener,
    IMetricCallback,
    innermost,
    method_of,
)
from runnerkit.steps.gradient_step import IDLE, without_weight

if TYPE_CHECKING:
    from runnerkit.callback import IRunner
    from runnerkit.engine import IEngine

log = logging.getLogger(__name__)

EXCEPTION_HOOKS_S = 60.0  # for each on_exception hook, if other processes wait
_SAVED_IN = ("on_step_end", "on_epoch_end")  # after everyone else: a checkpoint holds what they did


class Listeners(dict[str, tuple[Callable[[Any], None], ...]]):
    """Methods that act on each event, in order; an event without overrides costs nothing."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys((*EVENTS, IDLE), ()))

    def bind(self, runner: IRunner, callbacks: Iterable[ICallback] = ()) -> None:
        """Find the methods of `callbacks` that run in this process, and of the runner, once for all events."""
        acting, receives = active(callbacks, runner.engine), runner.current_run.receives
        savers = [each for each in acting if isinstance(innermost(each), ICheckpointCallback)]
        others = [each for each in acting if each not in savers]
        for event in EVENTS:
            if event.endswith("_start"):
                order: list[IListener] = [runner, *acting]
            elif event in _SAVED_IN:
                order = [*others, runner, *savers]
            else:
                order = [*acting, runner]
            self[event] = tuple(
                method_of(each, event) for each in order if each.listens_to(event) and receives(each, event)
            )
        scorers = [innermost(each) for each in savers if receives(each, "on_loader_end")]
        keep = [each.keep_scored_weights for each in scorers if isinstance(each, ICheckpointCallback)]
        self["on_loader_end"] = *keep, *self["on_loader_end"]
        counting = {each.on_batch_end for each in acting if _counts_samples(each)}
        self[IDLE] = without_weight, *(each for each in self["on_batch_end"] if each not in counting)

    def remove(self, event: str, listener: Callable[[Any], None]) -> None:
        """Take a method off an event, so that the following steps do not call it."""
        self[event] = tuple(each for each in self[event] if each != listener)

    def release(self) -> None:
        """Forget all methods: those of the runner refer to it, which would keep its loaders' workers."""
        self.update(dict.fromkeys(self, ()))

    def emit(self, event: str, runner: IRunner) -> None:
        """Call the methods that act on `event`."""
        for listener in self[event]:
            listener(runner)

    def emit_exception(self, runner: IRunner, error: BaseException) -> None:
        """Call the methods that act on ``on_exception``; one that fails does not hide `error`."""
        for listener in self["on_exception"]:
            try:
                with _deadline(runner.engine, error, _name_of(listener)):
                    listener(runner)
            except Exception as another:
                error.add_note(f"{_name_of(listener)} raised {another!r}")
                log.error("%s failed", _name_of(listener), exc_info=another)


@contextmanager
def _deadline(engine: IEngine, error: BaseException, name: str) -> Iterator[None]:
    """End this process if the body takes too long and other processes wait for it."""

    def end() -> None:
        error.add_note(f"{name} did not end within {EXCEPTION_HOOKS_S:g} s, so its process was ended")
        engine.record_failure(error)
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(EXCEPTION_HOOKS_S, end)
    timer.daemon = True
    if engine.num_processes > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _name_of(method: Callable[..., Any]) -> str:
    owner = method.__self__ if isinstance(method, MethodType) else None
    return f"{type(owner).__name__}.{method.__name__}"


def active(callbacks: Iterable[ICallback], engine: IEngine | None) -> list[ICallback]:
    """Return the callbacks that run in this process, in order."""
    rank = engine.rank if engine is not None else 0
    return sorted((each for each in callbacks if CallbackNode(each.node).includes(rank)), key=lambda each: each.order)


def _counts_samples(callback: ICallback) -> bool:
    inner = innermost(callback)
    return isinstance(inner, IMetricCallback) and inner.counts_samples
