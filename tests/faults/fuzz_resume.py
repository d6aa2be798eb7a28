"""Interrupt random runs at random moments, resume them, and compare them with the runs that were not interrupted.

python -m tests.faults.fuzz_resume --cases 500 --seed 0
"""

import csv
import os
import random
import signal
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from runnerkit import dl
from runnerkit.callbacks.control.parts import stop_on_signal
from runnerkit.loop import stop_signals
from tests.faults.fuzz_parity import in_processes, main
from tests.faults.fuzz_run import UNKNOWN, Result, schedule, train, train_by_hand
from tests.faults.fuzz_setting import Setting
from tests.faults.kills import Send, exit_code_of
from tests.interrupt import Interrupt


@dataclass(frozen=True)
class Segment:
    """One of the runs that a case consists of.

    Attributes:
        how: it ends: by "num_steps" or "num_samples", the "clock", "SIGTERM", an "error", "SIGKILL", or at the "end".
        at: step at which it ends, or number of the clock's reading that shows that the time is up.
        every_steps: of checkpoints.
    """

    how: str
    at: int = 0
    num_processes: int = 1
    num_workers: int = 0
    persistent: bool = False
    every_steps: int | None = None


@dataclass(frozen=True)
class Case:
    """A setting, and the segments of its run; the last one completes it."""

    seed: int
    setting: Setting
    segments: tuple[Segment, ...]

    @classmethod
    def draw(cls, seed: int) -> "Case":
        """Draw a case, which depends on the seed only; one in ten has several processes, one in twenty workers."""
        chance = random.Random(seed)
        is_shared, num_workers = seed % 10 == 3, 2 if seed % 20 == 7 else 0
        setting = Setting.draw(chance, processes=6 if is_shared else 1, workers=num_workers)
        processes = chance.sample([1, 2, 3], 3) if is_shared and setting.kind != "ragged" else [1, 1, 1]
        ways = ["num_steps", "num_samples", "clock", "clock", "clock", "SIGTERM"]
        ways += [] if is_shared else ["error", "SIGKILL" if seed % 5 == 0 else "error"]
        total = train_by_hand(setting, num_processes=1, told=None).num_steps
        segments = [
            Segment(
                chance.choice(ways),
                at=chance.randint(1, total + 2),
                num_processes=processes[number % 3],
                num_workers=num_workers and chance.choice([0, num_workers]),
                persistent=chance.random() < 0.5,
                every_steps=chance.choice([None, 1, 2, 3]),
            )
            for number in range(chance.randint(2, 5))
        ]
        segments[-1] = replace(segments[-1], how="end", at=0)
        return cls(seed, setting, tuple(segments))

    @property
    def num_processes(self) -> int:
        """Processes of the run that is not interrupted; one, if the others have different numbers."""
        numbers = {each.num_processes for each in self.segments}
        return numbers.pop() if len(numbers) == 1 else 1

    @property
    def is_shared(self) -> bool:
        """True if a segment has several processes."""
        return any(each.num_processes > 1 for each in self.segments)

    def jobs(self, folder: Path) -> Iterator[tuple[int, Any]]:
        """Yield the number of processes and the function of each run."""
        samples = train_by_hand(self.setting, num_processes=1, told=UNKNOWN).samples
        whole = Segment("end", num_processes=self.num_processes)
        yield whole.num_processes, partial(run, self.setting, whole, folder / "whole", samples)
        for each in self.segments:
            yield each.num_processes, partial(run, self.setting, each, folder / "parts", samples)

    def difference(self, folder: Path, results: Sequence[Result | str | None]) -> str:
        """Describe how the interrupted run differs from the whole one; empty if it does not."""
        failed = next((each for each in results if isinstance(each, str)), None)
        expected, found = results[0], results[-1]
        if failed is not None or expected is None or found is None:
            return failed or "the last segment did not end"
        if (found.num_steps, found.num_samples) != (expected.num_steps, expected.num_samples):
            return f"{found.num_steps} steps of {found.num_samples} samples instead of {expected.num_steps} of " + str(
                expected.num_samples
            )
        is_exact = {each.num_processes for each in self.segments} == {self.num_processes}
        off = float((found.weights - expected.weights).abs().max())
        if off > (0 if is_exact else 1e-12) or found.rate != expected.rate:
            return f"weights are off by {off:.2g}, the learning rate is {found.rate:g} instead of {expected.rate:g}"
        tolerance = 0 if is_exact else 1e-9
        names = ("train", "valid") if not self.setting.num_samples else ("train",)
        different = [name for name in names if _are_different(folder, name, tolerance)]
        return f"the logs {different} differ" if different else ""


def run(setting: Setting, segment: Segment, logdir: Path, samples: Sequence[int]) -> Result | str | None:
    """Run a segment; return None if it was interrupted, and the traceback after an unexpected error."""
    if segment.how == "SIGKILL":
        return _in_fork(partial(_run, setting, segment, logdir, samples))
    return _run(setting, segment, logdir, samples)


def _run(setting: Setting, segment: Segment, logdir: Path, samples: Sequence[int]) -> Result | str | None:
    callbacks: list[dl.Callback] = []
    if segment.how == "num_steps":
        setting = replace(setting, num_steps=min(segment.at, setting.num_steps or segment.at))
    elif segment.how == "num_samples" and (setting.kind != "ragged" or segment.num_processes == 1):
        limit = samples[min(segment.at, len(samples)) - 1]
        setting = replace(setting, num_samples=min(limit, setting.num_samples or limit))
    elif segment.how in ("SIGTERM", "SIGKILL"):
        callbacks = [Send(signal.Signals[segment.how], step=segment.at, rank=segment.num_processes - 1)]
    elif segment.how == "error":
        callbacks = [Interrupt(segment.at)]
    save = dl.CheckpointCallback(
        logdir, content="runner", every_steps=segment.every_steps, max_hours=1.0 if segment.how == "clock" else None
    )
    try:
        with times(segment.at if segment.how == "clock" else None):
            return train(
                setting,
                num_processes=segment.num_processes,
                num_workers=segment.num_workers,
                persistent=segment.persistent,
                scheduler=lambda optimizer, _: schedule(optimizer, UNKNOWN),
                callbacks=[save, *callbacks],
                logdir=logdir,
                resume="auto",
                log_every=1,
                loggers={"console": None, "tensorboard": None},
            )
    except (stop_signals.Preempted, KeyboardInterrupt):
        return None
    except Exception:
        return f"raised {traceback.format_exc(limit=-3)}"


@contextmanager
def times(up_at: int | None) -> Iterator[None]:
    """Let the time of ``max_hours`` be up at that reading of the clock, and processes agree on it at each step."""
    readings, steps = count(1), count()
    clock = SimpleNamespace(monotonic=lambda: 1e9 if up_at is not None and next(readings) > up_at else 0.0)
    slow = SimpleNamespace(monotonic=lambda: float(next(steps)))
    with mock.patch.object(stop_on_signal, "time", clock), mock.patch.object(stop_signals, "time", slow):
        yield


def _in_fork(function: Any) -> str | None:
    """Call a function in a forked process, which may be killed."""
    code = exit_code_of(lambda: os._exit(int(isinstance(function(), str))))
    return None if code in (0, -signal.SIGKILL) else f"a forked segment ended with {code}"


def _are_different(folder: Path, name: str, tolerance: float) -> bool:
    one, other = (_rows(folder / part / "csv" / f"{name}.csv") for part in ("whole", "parts"))
    if [row.keys() for row in one] != [row.keys() for row in other]:
        return True
    pairs = [(mine[key], theirs[key]) for mine, theirs in zip(one, other, strict=True) for key in mine]
    return any(each != its and abs(float(each or "nan") - float(its or "nan")) > tolerance for each, its in pairs)


def _rows(path: Path) -> list[dict[str, str]]:
    with suppress(FileNotFoundError), path.open() as file:
        return list(csv.DictReader(file))
    return []


def differences(cases: Sequence[Case]) -> Iterator[str]:
    """Run the cases, those with several processes in one launch; yield a line for each that differs."""
    with tempfile.TemporaryDirectory() as name:
        jobs = {case: list(case.jobs(Path(name, str(case.seed)))) for case in cases}
        shared = [case for case in cases if case.is_shared]
        results = iter(in_processes([job for case in shared for job in jobs[case]]) if shared else ())
        for case in cases:
            own = [next(results) if case.is_shared else job() for _, job in jobs[case]]
            if what := case.difference(Path(name, str(case.seed)), own):
                yield f"seed {case.seed}: {what}\n    {case}"


if __name__ == "__main__":
    main(Case.draw, differences)
