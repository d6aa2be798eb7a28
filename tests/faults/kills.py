"""Signals at a step of a run, and calls in forked processes that may be killed between two operations on the disk."""

import os
import time
from collections.abc import Callable
from typing import Any

from runnerkit import dl


class Send(dl.Callback):
    """A callback that sends a signal after `step` training steps, or in the validation after them; rank -1 is all."""

    def __init__(
        self, number: int, *, step: int, rank: int = 0, loader_key: str = "train", times: int = 1, pause_s: float = 0.0
    ) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.number, self.step, self.at_rank, self.loader_key, self.times = number, step, rank, loader_key, times
        self.pause_s = pause_s  # between two signals

    def on_batch_end(self, runner: dl.IRunner) -> None:
        is_mine = self.at_rank in (runner.engine.rank, -1)
        if is_mine and (runner.batch_step, runner.loader_key) == (self.step, self.loader_key):
            for time_of_all in range(self.times):
                time.sleep(self.pause_s if time_of_all else 0)
                os.kill(os.getpid(), self.number)
            self.times = 0


def exit_code_of(function: Callable[[], Any]) -> int:
    """Call a function in a forked process; return 0, 1 after an exception, or how the process was ended."""
    pid = os.fork()
    if not pid:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(operation: int) -> None:
    """Let this process exit with code 9 at its `operation`-th change of the disk from now on."""
    num_left = operation

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    for name in ("replace", "fsync", "unlink", "link", "rename", "symlink"):
        setattr(os, name, deadly(getattr(os, name)))
