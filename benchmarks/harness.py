"""Runs of candidates in rounds, each in a fresh process, compared with the first candidate."""

import json
import math
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import turns

ROOT = Path(__file__).parents[1]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
Report = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A script that prints its figures as JSON in its last line: ``{"step_us": 98.1, "same": {"loss": 1.99}}``.

    Attributes:
        name: heading of its row.
        module: the script, run with ``python -m`` from the root of the repository.
        arguments: passed to the script.
        python: the interpreter; peers have their own.
        launcher: the module that starts the script, and its arguments, such as ``("torch.distributed.run",)``.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    python: str = sys.executable
    launcher: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        return [self.python, *(["-m", *self.launcher] if self.launcher else []), "-m", self.module, *self.arguments]


@dataclass(frozen=True)
class Figure:
    """A number that candidates print: its key, its column heading, and the number of decimals."""

    key: str
    heading: str
    digits: int = 1


@dataclass
class Outcome:
    """The reports of all rounds by candidate name, and the reason for each candidate that failed."""

    reports: dict[str, list[Report]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def values(self, name: str, figure: Figure) -> list[float]:
        """Return a figure of each round, or an empty list if the candidate does not report it."""
        return [report[figure.key] for report in self.reports[name] if figure.key in report]

    def ratio(self, name: str, figure: Figure) -> float | None:
        """Return the median over the rounds of the ratio to the first candidate."""
        key, first = figure.key, next(iter(self.reports.values()))
        rounds = zip(self.reports[name], first, strict=True)
        ratios = [own[key] / its[key] for own, its in rounds if key in own and its.get(key)]
        return statistics.median(ratios) if ratios else None


class CandidateFailed(Exception):
    """Raised when a candidate fails, times out, or prints no figures."""


def run(candidate: Candidate, *, timeout_s: float = 900, its_turns: str | None = None) -> Report:
    """Run a candidate once; its stderr is a terminal, so that progress bars are drawn as usual.

    Args:
        its_turns: path of the socket through which it takes turns.
    Raises:
        CandidateFailed: with the last line of its stderr.
    """
    environment = {**os.environ, **ONE_THREAD, "BENCHMARK_STARTED_AT": str(time.time())}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users' installs are compiled
    if its_turns is not None:
        environment[turns.PLACE] = its_turns
    terminal, its_terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            candidate.command, cwd=ROOT, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=its_terminal, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        os.close(terminal)
        raise CandidateFailed(f"cannot start: {error}") from None
    finally:
        os.close(its_terminal)
    said: list[bytes] = []
    listener = threading.Thread(target=_listen, args=(terminal, said))
    listener.start()
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # including all child processes
        process.communicate()
        raise CandidateFailed(f"took more than {timeout_s:g} s") from None
    finally:
        listener.join(timeout=10)
    lines = output.strip().splitlines()
    if process.returncode != 0 or not lines or not lines[-1].startswith("{"):
        last_words = b"".join(said).decode(errors="replace").strip().splitlines() or ["no message"]
        raise CandidateFailed(f"exit code {process.returncode}: {last_words[-1].strip()}")
    return json.loads(lines[-1])


def _listen(terminal: int, said: list[bytes]) -> None:
    try:
        while chunk := os.read(terminal, 4096):
            said.append(chunk)
            del said[:-50]
    except OSError:  # on Linux, the other side was closed
        pass
    finally:
        os.close(terminal)


Result = Report | CandidateFailed


def run_all(candidates: Sequence[Candidate], *, timeout_s: float) -> Iterator[Result]:
    """Run the candidates one after the other."""
    for each in candidates:
        yield _result(each, timeout_s)


def run_in_turns(candidates: Sequence[Candidate], *, timeout_s: float) -> list[Result]:
    """Start all candidates, and wake one at a time: their scripts call `Turns.wait` before each stretch of work."""
    timeout_s *= len(candidates)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(candidates)) as pool, ExitStack() as stack:
        paths = [f"{folder}/{number}" for number in range(len(candidates))]
        listeners = [stack.enter_context(turns.listen(path)) for path in paths]
        results = [pool.submit(_result, each, timeout_s, path) for each, path in zip(candidates, paths, strict=True)]
        turns.let_take_turns(listeners, timeout_s=timeout_s)
        return [each.result() for each in results]


def _result(candidate: Candidate, timeout_s: float, its_turns: str | None = None) -> Result:
    try:
        return run(candidate, timeout_s=timeout_s, its_turns=its_turns)
    except CandidateFailed as failure:
        return failure
    finally:
        if its_turns is not None:
            turns.has_ended(its_turns)


def measure(
    candidates: Sequence[Candidate],
    *,
    num_rounds: int,
    tolerance: float = 1e-4,
    timeout_s: float = 900,
    in_turns: bool = False,
) -> Outcome:
    """Run A B C A B C ...; drop and report candidates that fail or do different work than the first.

    Args:
        tolerance: relative, for the values in `same`.
        in_turns: run a round's candidates concurrently and let them work in turns; every other round is C B A.
    Raises:
        CandidateFailed: the first candidate, which is the baseline, failed.
    """
    outcome = Outcome({each.name: [] for each in candidates})
    first = candidates[0].name
    for number in range(num_rounds):
        racing = [each for each in candidates if each.name not in outcome.failures]
        if in_turns:
            order = -1 if number % 2 else 1
            results: Iterable[Result] = run_in_turns(racing[::order], timeout_s=timeout_s)[::order]
        else:
            results = run_all(racing, timeout_s=timeout_s)
        for candidate, report in zip(racing, results, strict=True):
            try:
                if isinstance(report, CandidateFailed):
                    raise report
                if candidate.name != first:
                    check_same(report, outcome.reports[first][-1], tolerance=tolerance)
            except CandidateFailed as failure:
                if candidate.name == first:
                    raise CandidateFailed(f"{first}: {failure}") from None
                outcome.failures[candidate.name] = str(failure)
                del outcome.reports[candidate.name]
                print(f"  {candidate.name}: {failure}", file=sys.stderr, flush=True)
                continue
            outcome.reports[candidate.name].append(report)
            print(f"  {candidate.name}: {json.dumps(report)}", file=sys.stderr, flush=True)
    return outcome


def check_same(report: Report, first: Report, *, tolerance: float) -> None:
    """Raise CandidateFailed unless both did the same work, judged by the values in `same`."""
    own, others = report.get("same", {}), first.get("same", {})
    if own.keys() != others.keys():
        raise CandidateFailed(f"did different work: reports {sorted(own)} instead of {sorted(others)}")
    for key, value in own.items():
        if not math.isclose(value, others[key], rel_tol=tolerance):
            raise CandidateFailed(f"did different work: {key} is {value:.6g} instead of {others[key]:.6g}")
