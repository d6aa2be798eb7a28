"""Kill a data worker, a rank or the parent of a job, under each launcher, until the job is complete.

python -m tests.faults.launched_drill --kills 5 --page docs/reliability.md
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import psutil

from tests.engines.launch_commands import MPIRUN, PYTHON, TORCHRUN
from tests.faults.drill import Tally, report
from tests.faults.fingerprint import differences, fingerprint

ROOT = Path(__file__).parents[2]
LAUNCHERS = {"plain python": [PYTHON], "torchrun": TORCHRUN, "mpirun": MPIRUN}
VICTIMS = ("a data worker", "a rank", "the parent")
LIMIT_S = 120.0  # time for a job to start or to end, on a busy machine


def attempt(launcher: str, logdir: Path, victim: str | None, delay_s: float, tally: Tally) -> bool:
    """Start the job, kill a victim `delay_s` after it exists, wait for the rest to end; return whether it completed."""
    command = [*LAUNCHERS[launcher], str(Path(__file__).with_name("launched_job.py")), str(logdir)]
    with logdir.with_suffix(".log").open("a") as log:
        parent = _started(command, log)
    family: set[psutil.Process] = set()
    killed_at = None
    deadline = time.monotonic() + LIMIT_S
    while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{launcher}: did not end within {LIMIT_S:g} s, see {log.name}"
        found = _members(parent)
        family.update(*found.values())
        if killed_at is None and victim is not None and found[victim]:
            time.sleep(delay_s)
            with suppress(psutil.NoSuchProcess):
                random.choice(found[victim]).kill()
                killed_at, deadline = time.monotonic(), time.monotonic() + LIMIT_S
        time.sleep(0.02)
    code = parent.wait()
    while left := [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            for each in left:
                each.kill()
            raise AssertionError(f"{launcher}: {left} were left {LIMIT_S:g} s after the kill of {victim}")
        time.sleep(0.02)
    if code != 0 and killed_at is None:
        raise AssertionError(f"{launcher}: exit code {code} without a kill, see {log.name}")
    if code != 0 and killed_at is not None and victim is not None:
        tally.kills[victim] += 1
        tally.longest_s = max(tally.longest_s, time.monotonic() - killed_at)
    return code == 0


def _started(command: list[str], log: TextIO) -> psutil.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def _members(parent: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Find the processes of a job: the ranks are the parent's children, data workers theirs."""
    ranks, workers = [], []
    with suppress(psutil.NoSuchProcess):
        ranks = [each for each in parent.children() if _is_python(each)]
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            workers += [each for each in rank.children() if each.cmdline() == rank.cmdline()]  # forks
    return {"a data worker": workers, "a rank": ranks, "the parent": [parent] if len(ranks) == 2 else []}


def _is_python(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return Path(process.exe()) == Path(sys.executable).resolve()
    return False


def drill(launcher: str, num_kills: int, *, folder: Path, expected: dict[str, object], seed: int = 0) -> Tally:
    """Kill each victim `num_kills` times; resume each run until it completes, and compare it with `expected`."""
    tally, chance = Tally(2), random.Random(seed)
    while wanted := [victim for victim in VICTIMS if tally.kills[victim] < num_kills]:
        tally.num_runs += 1
        logdir = folder / f"{launcher.replace(' ', '-')}-{tally.num_runs}"
        num_attempts, is_complete = 0, False
        while not is_complete:
            # Two kills per run: most of the time is spent on starting it.
            victim = chance.choice(wanted) if num_attempts < 2 else None
            is_complete = attempt(launcher, logdir, victim, chance.uniform(0.0, 2.0), tally)
            num_attempts += 1
        found = differences(expected, fingerprint(logdir))
        tally.different += [f"{logdir.name}: {key} differs" for key in found]
        if not found:
            shutil.rmtree(logdir)
    return tally


def table(tallies: dict[str, Tally]) -> str:
    """Return a Markdown table with a row for each victim and a column for each launcher."""
    each = tallies.values()
    rows = {f"kills of {victim}": [str(tally.kills[victim]) for tally in each] for victim in VICTIMS} | {
        "runs that were resumed until they were complete": [str(tally.num_runs) for tally in each],
        "of these, equal to the run that was not killed": [str(tally.num_runs - tally.num_different) for tally in each],
        "longest time from a kill to the end of all processes": [f"{tally.longest_s:.1f} s" for tally in each],
    }
    lines = [f"| {head} | {' | '.join(cells)} |" for head, cells in rows.items()]
    return "\n".join([f"| | {' | '.join(tallies)} |", "|---|" + "---:|" * len(tallies), *lines])


def main() -> None:
    """Drill under each launcher that is installed, print a table, and exit with 1 if a run was different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of each victim under each launcher")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, help="also write the table to this page")
    options = parser.parse_args()
    tallies = {}
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        assert attempt("plain python", whole, None, 0.0, Tally(2)), "the run fails by itself"
        expected = fingerprint(whole)
        for launcher, command in LAUNCHERS.items():
            if shutil.which(command[0]) is not None:
                tallies[launcher] = drill(
                    launcher, options.kills, folder=Path(name), expected=expected, seed=options.seed
                )
    wrong = [line for tally in tallies.values() for line in tally.different]
    report(table(tallies), wrong, "launched drills", options.page)


if __name__ == "__main__":
    main()
