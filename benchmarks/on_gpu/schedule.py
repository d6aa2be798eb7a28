"""The order of checks: each in a process with a time limit, timed checks alone, until the total time is spent."""

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.on_gpu import child
from benchmarks.on_gpu.check import Check, Outcome, Setting

POLL_S = 0.02
LEAST_S = 5.0  # with less time left, no check starts
NUM_LAST_LINES = 15
STACK_STARTS = ("Timeout (", "Fatal Python error")  # written by faulthandler, the innermost call first
NO_TIME = "no time left"


@dataclass
class Running:
    """A check and its process."""

    part: str
    check: Check
    process: BaseProcess
    began: float
    limit_s: float
    result: Path
    output: Path

    def outcome(self) -> Outcome | None:
        """Return the outcome once the process has ended or its time is up, else None."""
        seconds = time.monotonic() - self.began
        is_late = seconds > self.limit_s
        if self.process.is_alive() and not is_late:
            return None
        self.kill()
        if self.result.exists():
            outcome = Outcome(**json.loads(self.result.read_text()))
        else:
            reason = f"took more than {self.limit_s:.0f} s" if is_late else _end(self.process.exitcode)
            outcome = Outcome(self.part, self.check.name, "failed", reason)
        outcome.seconds = seconds
        if outcome.status == "failed" and self.output.exists():
            outcome.last_lines = telling_lines(self.output.read_text(errors="replace"))
        return outcome

    def kill(self) -> None:
        """Kill the process and its child processes, also those that it left behind."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # it may have been killed before it had a group
        self.process.join()


def telling_lines(output: str) -> list[str]:
    """Return the last lines of an output, or the first lines of the stack that a hang or a crash left in it."""
    lines = output.strip().splitlines()
    stacks = [number for number, line in enumerate(lines) if line.startswith(STACK_STARTS)]
    return lines[stacks[0] :][:NUM_LAST_LINES] if stacks else lines[-NUM_LAST_LINES:]


def _end(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by signal {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code} and without a result"


def run_checks(
    parts: Sequence[tuple[str, Sequence[Check]]],
    setting: Setting,
    *,
    limit_s: float,
    num_jobs: int,
    start_method: str,
    began: float | None = None,
) -> Iterator[Outcome]:
    """Run the checks of all parts in order; yield each outcome when it is known.

    Args:
        limit_s: total seconds, counted from `began`; checks that are left then are reported as not run.
        num_jobs: number of checks that run at the same time; timed checks run alone.
        start_method: of multiprocessing: "fork" saves the import of torch, "spawn" starts a fresh interpreter.
    """
    deadline = (time.monotonic() if began is None else began) + limit_s
    waiting = [(part, check) for part, checks in parts for check in checks]
    running: list[Running] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            while waiting or running:
                while waiting and _may_start(waiting[0][1], running, num_jobs):
                    part, check = waiting.pop(0)
                    left_s = deadline - time.monotonic()
                    if left_s < LEAST_S:
                        yield Outcome(part, check.name, "not run", NO_TIME)
                    else:
                        path = Path(folder) / str(len(waiting))
                        running.append(_start(part, check, setting, path, min(check.limit_s, left_s), start_method))
                for each in [*running]:
                    if (outcome := each.outcome()) is not None:
                        running.remove(each)
                        yield outcome
                time.sleep(POLL_S)
        finally:
            for each in running:
                each.kill()


def _may_start(check: Check, running: Sequence[Running], num_jobs: int) -> bool:
    if not running:
        return True
    return not check.is_timed and not running[0].check.is_timed and len(running) < num_jobs


def _start(part: str, check: Check, setting: Setting, path: Path, limit_s: float, start_method: str) -> Running:
    result, output = path.with_suffix(".json"), path.with_suffix(".txt")
    target: Callable[..., None] = child.run
    context = multiprocessing.get_context(start_method)
    process = context.Process(target=target, args=(part, check.name, setting, result, output, limit_s))  # type: ignore[attr-defined]
    process.start()
    return Running(part, check, process, time.monotonic(), limit_s, result, output)
