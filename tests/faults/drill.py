"""Kill a training run repeatedly, at any point, until it completes; it must equal the run that was not killed.

python -m tests.faults.drill --kills 100 --page docs/reliability.md
"""

import argparse
import datetime
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from benchmarks.results import write_section
from runnerkit import dl
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.engines.process_environment import STORE_VARIABLE
from runnerkit.loop.run import Run
from tests.data.stream_sources import write_files
from tests.faults import job
from tests.faults.fingerprint import differences, fingerprint

TIME = "any moment"


class Place(NamedTuple):
    """A point of a program at which it may be killed.

    Attributes:
        owner: of the function.
        when: "before" or "after" the call.
        most_calls: the largest number of the call at which the process is killed.
        argument: pattern at the start of the first argument behind `self`; calls with others do not count.
        rank: the only process that comes there; None for all.
    """

    owner: Any
    name: str
    when: str
    most_calls: int
    argument: str | None = None
    rank: int | None = None

    def is_meant(self, arguments: tuple[Any, ...]) -> bool:
        return self.argument is None or re.match(self.argument, str(arguments[1])) is not None


PLACES: dict[str, Place] = {
    "before a step": Place(Run, "run_batch", "before", 40),
    "in the forward pass": Place(nn.Linear, "forward", "before", 80),
    "in the backward pass": Place(torch.Tensor, "backward", "before", 40),
    "after the optimizer's step": Place(torch.optim.Adam, "step", "after", 40),
    "between the file and its name": Place(os, "replace", "before", 40),
    "after the file has its name": Place(os, "replace", "after", 40),
    "before a sync to the disk": Place(os, "fsync", "before", 60),
    "in the thread that writes": Place(torch, "save", "before", 14),
    "before the index is written": Place(CheckpointFolder, "_write_index", "before", 20),
    "before old files are deleted": Place(CheckpointFolder, "keep", "before", 14),
    "at an epoch's end": Place(Run, "emit", "after", 30),
    "before CSV is flushed": Place(dl.CSVLogger, "flush", "before", 12),
    "before TensorBoard is flushed": Place(dl.TensorboardLogger, "flush", "before", 12),
}
LIMIT_S = 60.0  # time for a process to end by itself after another was killed
WORKERS_LIMIT_S = 10.0  # further time for its loader's workers


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: its place and call, or its delay, and its rank."""

    place: str
    rank: int
    num_calls: int = 0
    seconds: float = 0.0
    places: Mapping[str, Place] = field(default_factory=lambda: PLACES, repr=False)

    @classmethod
    def draw(
        cls, chance: random.Random, num_processes: int, *, places: Mapping[str, Place] = PLACES, longest_s: float = 2.0
    ) -> "Kill":
        name, rank = chance.choice([*places, TIME]), chance.randrange(num_processes)
        if name == TIME:
            return cls(name, rank, seconds=chance.uniform(0.05, longest_s), places=places)
        place = places[name]
        rank = rank if place.rank is None else place.rank
        return cls(name, rank, num_calls=chance.randint(1, place.most_calls), places=places)

    def arm(self) -> None:
        """Patch this process so that it is killed at the place."""
        if self.place == TIME:
            return
        place = self.places[self.place]
        function, num_left = getattr(place.owner, place.name), self.num_calls

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_left
            if not place.is_meant(args):
                return function(*args, **kwargs)
            num_left -= 1
            if num_left == 0 and place.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if num_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(place.owner, place.name, deadly)


@dataclass
class Tally:
    """Results of a drill.

    Attributes:
        kills: number of kills by place; `num_runs` runs completed, and `different` lists how runs deviated.
        longest_s: longest time in seconds that a process took to end after another one was killed.
    """

    num_processes: int
    source: str | None = None
    kills: Counter[str] = field(default_factory=Counter)
    num_runs: int = 0
    different: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    @property
    def num_different(self) -> int:
        """Number of runs that did not equal the one not killed."""
        return len({each.partition(":")[0] for each in self.different})

    @property
    def title(self) -> str:
        """A column's heading."""
        return "one process" if self.num_processes == 1 else f"{self.num_processes} processes"


def attempt(
    logdir: Path,
    num_processes: int,
    kill: Kill | None,
    tally: Tally,
    *,
    source: str | None = None,
    run: Callable[[], None] | None = None,
) -> bool:
    """Start the run's processes; return whether they completed. All are forked: torch is imported once.

    Args:
        run: what each process calls; default: the job in `logdir`.
    """
    store = logdir.with_suffix(".store")
    store.unlink(missing_ok=True)
    run = run or partial(job.run, logdir, num_processes=num_processes, source=source)
    pids = [_start(logdir, rank, num_processes, store, kill, run) for rank in range(num_processes)]
    try:
        return _watch(pids, logdir, kill, tally)
    except BaseException:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        raise


def _watch(pids: Sequence[int], logdir: Path, kill: Kill | None, tally: Tally) -> bool:
    """Wait for the processes of an attempt, which are to end if one is killed; return whether all completed."""
    if kill is not None and kill.place == TIME:
        time.sleep(kill.seconds)
        with suppress(ProcessLookupError):
            os.kill(pids[kill.rank], signal.SIGKILL)
    codes: dict[int, int] = {}
    died_at: float | None = None
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
                if codes[pid] and died_at is None:
                    died_at = time.monotonic()
        if died_at is not None and time.monotonic() - died_at > LIMIT_S:
            break
        time.sleep(0.01)
    if died_at is not None:
        tally.longest_s = max(tally.longest_s, time.monotonic() - died_at)
    for pid in pids:
        num_left = _wait_for_workers(pid) if pid in codes else 0
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if pid not in codes:
            os.waitpid(pid, 0)
            raise AssertionError(f"a process was still there {LIMIT_S:g} s after {kill}\n{_tail(logdir)}")
        if num_left:
            raise AssertionError(
                f"{num_left} of a loader's workers were still there {WORKERS_LIMIT_S:g} s after {kill}"
            )
    if kill is not None and codes[pids[kill.rank]] == -signal.SIGKILL:
        tally.kills[kill.place] += 1
    elif any(codes.values()):
        raise AssertionError(f"exit codes {list(codes.values())} without a kill ({kill})\n{_tail(logdir)}")
    return not any(codes.values())


def _tail(logdir: Path) -> str:
    """Return the last lines that the processes of a run have written."""
    log = Path(f"{logdir}.log")
    return log.read_text()[-4000:] if log.exists() else ""


def _wait_for_workers(group: int) -> int:
    """Give a process group time to end by itself; return how many of its processes have not ended."""
    until = time.monotonic() + WORKERS_LIMIT_S
    while (num_left := sum(map(partial(_is_in, group), psutil.process_iter()))) and time.monotonic() < until:
        time.sleep(0.05)
    return num_left


def _is_in(group: int, process: psutil.Process) -> bool:
    with suppress(psutil.Error, ProcessLookupError):
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    return False


def _start(logdir: Path, rank: int, num_processes: int, store: Path, kill: Kill | None, run: Callable[[], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    code = 1
    try:
        if num_processes > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes),
                "LOCAL_WORLD_SIZE": str(num_processes), STORE_VARIABLE: str(store),
            }  # fmt: skip
        if kill is not None:
            os.dup2(os.open(f"{logdir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            if kill.rank == rank:
                kill.arm()
        torch.set_num_threads(1)
        run()
        code = 0
    except BaseException:
        if kill is not None:  # into the log; usually, it only reports that a peer was killed
            traceback.print_exc()
    finally:
        os._exit(code)


def whole_run(folder: Path, num_processes: int, source: str | None = None) -> dict[str, Any]:
    """Train without kills; return the fingerprint."""
    logdir = folder / f"whole-{num_processes}-{source}"
    write_files(folder / "shards")
    assert attempt(logdir, num_processes, None, Tally(num_processes), source=source), "the run fails by itself"
    return fingerprint(logdir)


def drill(
    num_kills: int,
    num_processes: int,
    *,
    folder: Path,
    seed: int = 0,
    source: str | None = None,
    is_file_url: bool = False,
    expected: dict[str, Any] | None = None,
) -> Tally:
    """Kill runs `num_kills` times in total; each is resumed until it completes, and is then compared.

    Args:
        is_file_url: pass the logdirs of runs that are killed as file:// URLs.
        expected: fingerprint of the run that is not killed, which is trained by default.
    """
    tally, chance = Tally(num_processes, source), random.Random(seed)
    write_files(folder / "shards")
    expected = expected or whole_run(folder, num_processes, source)
    while tally.kills.total() < num_kills:
        tally.num_runs += 1
        broken = folder / f"broken-{num_processes}-{source}-{tally.num_runs}"
        logdir = broken.as_uri() if is_file_url else broken
        run = partial(job.run, logdir, num_processes=num_processes, source=source)
        struck = []
        while not attempt(broken, num_processes, kill := Kill.draw(chance, num_processes), tally, run=run):
            struck.append(kill)
        for key in differences(expected, fingerprint(broken)):
            tally.different.append(f"{broken.name}: {key} differs after {struck}")
        counts = f"{tally.kills.total()} kills, {len(tally.different)} differences"
        print(f"{logdir}: {len(struck)} kills; in all runs {counts}", file=sys.stderr)
        if not tally.different:
            shutil.rmtree(broken)
    return tally


def table(tallies: Sequence[Tally], *, places: Mapping[str, Place] = PLACES) -> str:
    """Return a Markdown table with a row for each place and for the results."""
    rows = {place: [str(each.kills[place]) for each in tallies] for place in [*places, TIME]} | {
        "all kills": [str(each.kills.total()) for each in tallies],
        "runs that were resumed until they were complete": [str(each.num_runs) for each in tallies],
        "of these, equal to the run that was not killed": [str(each.num_runs - each.num_different) for each in tallies],
        "longest time until the other processes had ended": [
            f"{each.longest_s:.1f} s" if each.num_processes > 1 else "-" for each in tallies
        ],
    }
    lines = [f"| {head} | {' | '.join(cells)} |" for head, cells in rows.items()]
    return "\n".join(
        [f"| killed | {' | '.join(each.title for each in tallies)} |", "|---|" + "---:|" * len(tallies), *lines]
    )


def table_of_streams(tallies: Sequence[Tally]) -> str:
    """Return a Markdown table with a row for each source of a stream."""
    lines = [
        f"| {each.source} | {each.num_processes} | {each.kills.total()} | {each.num_runs} | "
        f"{each.num_runs - each.num_different} |"
        for each in tallies
    ]
    heads = "| source | processes | kills | runs | of these, equal to the run that was not killed |"
    return "\n".join([heads, "|---|---:|---:|---:|---:|", *lines])


def report(found: str, wrong: list[str], section: str, page: Path | None) -> None:
    """Print a table, write it to a section of a page, print what is wrong, and exit with 1 if something is."""
    print(found)
    print(*wrong, sep="\n")
    if page is not None:
        packages = f", s3fs {version('s3fs')}" if "store" in section else ""
        where = f"torch {torch.__version__}, Python {platform.python_version()}{packages}, on the CPU."
        write_section(section, f"{datetime.date.today()}, {where}\n\n{found}", page, command="make drills")
    sys.exit(bool(wrong))


def main() -> None:
    """Drill, print a table, and exit with 1 if a run was different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="for each number of processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", action="store_true", help="train on streams, each with two data workers")
    parser.add_argument("--mesh", action="store_true", help="train a sharded model in four processes")
    parser.add_argument("--file-url", action="store_true", help="pass the logdir as file:///path")
    parser.add_argument("--page", type=Path, help="also write the table to this page")
    options = parser.parse_args()
    if options.page is not None and options.file_url:
        parser.error("--page holds the table of local paths, which --file-url would overwrite")
    with tempfile.TemporaryDirectory() as folder:
        run = partial(drill, options.kills, folder=Path(folder), seed=options.seed, is_file_url=options.file_url)
        sources = job.STREAMS if options.streams else [job.MESH if options.mesh else None]
        processes = [4] if options.mesh else options.processes
        tallies = [run(num_processes=number, source=source) for source in sources for number in processes]
    found = table_of_streams(tallies) if options.streams else table(tallies)
    section = "stream drills" if options.streams else "mesh drills" if options.mesh else "drills"
    report(found, [line for tally in tallies for line in tally.different], section, options.page)


if __name__ == "__main__":
    main()
