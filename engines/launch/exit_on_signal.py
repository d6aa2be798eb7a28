"""Handling of SIGTERM and SIGHUP as an exit that closes files."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from runnerkit.support.platform import OwnHandler, signals

_AGAIN_S = 0.02


class ExitOnSignal(OwnHandler):
    """Signal handler that unwinds, so that files are closed, and exits with the shell's code for the signal.

    Attributes:
        has_fired: whether it has raised SystemExit, which it does once.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._hook_before = sys.unraisablehook
        self.has_fired = False

    def install(self) -> None:
        """Handle SIGTERM, and SIGHUP unless it is ignored (nohup) or already handled; call it in the main thread."""
        signal.signal(signal.SIGTERM, self)
        for number in signals("SIGHUP"):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self)
        sys.unraisablehook = self._ask_again

    def remove(self) -> None:
        """Restore the default handlers, unless another one has been installed since."""
        if sys.unraisablehook == self._ask_again:
            sys.unraisablehook = self._hook_before
        # A generator may be closed in another thread than the one that started it.
        if threading.current_thread() is threading.main_thread():
            for number in signals("SIGTERM", "SIGHUP"):
                if signal.getsignal(number) is self:
                    signal.signal(number, signal.SIG_DFL)

    @staticmethod
    def ignore() -> None:
        """Ignore signals while the process ends or reports its failure."""
        for number in signals("SIGTERM", "SIGHUP"):
            signal.signal(number, signal.SIG_IGN)

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Raise SystemExit, once."""
        if os.getpid() != self._owner:
            os._exit(128 + number)  # a forked process, such as a loader's worker, must not unwind its parent's stack
        if not self.has_fired:
            self.has_fired = True
            raise SystemExit(128 + number)

    def _ask_again(self, unraisable: Any) -> None:
        """Resend the signal if Python dropped the exit, as it does around a fork, in finalizers and callbacks."""
        if self.has_fired and unraisable.exc_type is SystemExit and os.getpid() == self._owner:
            self.has_fired = False
            threading.Timer(_AGAIN_S, os.kill, [self._owner, signal.SIGTERM]).start()
        else:
            self._hook_before(unraisable)
