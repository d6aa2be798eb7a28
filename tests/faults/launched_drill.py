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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

import psutil

from tests.alive import is_alive
from tests.engines.launch_commands import MPIRUN, PYTHON, TORCHRUN
from tests.faults import proxy
from tests.faults.drill import Tally, report
from tests.faults.fingerprint import differences, fingerprint
from tests.faults.proxy import Proxy
from tests.faults.store_drill import (
    CHANGED_OR_LEFT,
    SHARE_OF_EMPTY_DISKS,
    Neighborhood,
    StoreTally,
    Target,
    struck_by,
)
from tests.server_process import serving
from tests.storage.s3_server import Bucket

ROOT = Path(__file__).parents[2]
LAUNCHERS = {"plain python": [PYTHON], "torchrun": TORCHRUN, "mpirun": MPIRUN}
VICTIMS = ("a data worker", "a rank", "the parent")
LIMIT_S = 240.0  # time for a job to start or to end, on a busy machine


def attempt(
    launcher: str,
    logdir: Path,
    victim: str | None,
    delay_s: float,
    tally: Tally,
    *,
    target: Target | None = None,
    staging: Path = Path(),
) -> bool:
    """Start the job, kill a victim `delay_s` after it exists, wait for the rest to end; return whether it completed.

    Args:
        target: the logdir to use instead, in a store, with `staging` as the disk.
    """
    job = str(Path(__file__).with_name("launched_job.py"))
    command = [*LAUNCHERS[launcher], job, target.url if target is not None else str(logdir)]
    variables = target.variables(staging) if target is not None else {}
    with logdir.with_suffix(".log").open("a") as log:
        parent = _started(command, variables, log)
    family: set[psutil.Process] = set()
    killed_at = None
    deadline = time.monotonic() + LIMIT_S
    while is_alive(parent):
        if time.monotonic() > deadline:
            for each in (parent, *family):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            raise AssertionError(f"{launcher}: did not end within {LIMIT_S:g} s:\n{Path(log.name).read_text()[-4000:]}")
        found = _members(parent)
        family.update(*found.values())
        if killed_at is None and victim is not None and found[victim]:
            time.sleep(delay_s)
            with suppress(psutil.NoSuchProcess):
                random.choice(found[victim]).kill()
                killed_at, deadline = time.monotonic(), time.monotonic() + LIMIT_S
        time.sleep(0.02)
    code = parent.wait()
    while left := [each for each in family if is_alive(each)]:
        if time.monotonic() > deadline:
            for each in left:
                each.kill()
            raise AssertionError(f"{launcher}: {left} were left {LIMIT_S:g} s after the kill of {victim}")
        time.sleep(0.02)
    if code != 0 and killed_at is None:
        raise AssertionError(f"{launcher}: exit code {code} without a kill:\n{Path(log.name).read_text()[-4000:]}")
    if code != 0 and killed_at is not None and victim is not None:
        tally.kills[victim] += 1
        tally.longest_s = max(tally.longest_s, time.monotonic() - killed_at)
    return code == 0


def _started(command: list[str], variables: dict[str, str], log: TextIO) -> psutil.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def _members(parent: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Find the processes of a job: the ranks are the parent's children, data workers theirs.

    Launchers start each rank in a process group of its own; a child in the parent's group is a server of the tests.
    """
    ranks, workers = [], []
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        ranks = [each for each in parent.children() if _is_python(each) and os.getpgid(each.pid) != parent.pid]
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            workers += [each for each in rank.children() if each.cmdline() == rank.cmdline()]  # forks
    return {"a data worker": workers, "a rank": ranks, "the parent": [parent] if len(ranks) == 2 else []}


def _is_python(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return Path(process.exe()) == Path(sys.executable).resolve()
    return False


def drill(
    launcher: str,
    num_kills: int,
    *,
    folder: Path,
    expected: dict[str, object],
    seed: int = 0,
    server: str | None = None,
    faults: Proxy | None = None,
) -> StoreTally:
    """Kill each victim `num_kills` times; resume each run until it completes, and compare it with `expected`.

    Args:
        server, faults: an S3 server for the logdirs, and the proxy in front of it; default: local logdirs.
    """
    tally, chance = StoreTally(2), random.Random(seed)
    while wanted := [victim for victim in VICTIMS if tally.kills[victim] < num_kills]:
        tally.num_runs += 1
        name = f"{launcher.replace(' ', '-')}-{tally.num_runs}"
        logdir, target, neighborhood = folder / name, None, None
        if server is not None and faults is not None:
            logdir.mkdir()
            bucket = Bucket.create(name, server)
            target, neighborhood = Target(bucket.url("run"), logdir, faults.url), Neighborhood(bucket, "run")
        with struck_by(faults, tally, seed=tally.num_runs) if faults is not None else nullcontext():
            _complete(partial(attempt, launcher, logdir, tally=tally, target=target), wanted, logdir, chance, tally)
        found = differences(expected, target.fingerprint() if target is not None else fingerprint(logdir))
        tally.different += [f"{name}: {key} differs" for key in found]
        tally.others += [f"{name}: {each}" for each in (neighborhood.faults() if neighborhood is not None else ())]
        if not found:
            shutil.rmtree(logdir)
        counts = f"{tally.kills.total()} kills, {len(tally.different)} differences, {len(tally.others)} objects"
        print(f"{name}: in all runs {counts} of others changed or left", file=sys.stderr)
    return tally


def _complete(
    start: Callable[..., bool], victims: Sequence[str], folder: Path, chance: random.Random, tally: StoreTally
) -> None:
    """Start a job until it completes, partly on machines with an empty disk; kill it in the first two attempts, since
    most of the time is spent on starting it."""
    num_attempts, is_complete = 0, False
    while not is_complete:
        if not num_attempts or chance.random() < SHARE_OF_EMPTY_DISKS:
            tally.num_empty_disks += 1
        victim = chance.choice(victims) if num_attempts < 2 else None
        staging = folder / f"disk-{tally.num_empty_disks}"
        is_complete = start(victim=victim, delay_s=chance.uniform(0.0, 2.0), staging=staging)
        num_attempts += 1


def table(tallies: Mapping[str, StoreTally], *, is_in_store: bool) -> str:
    """Return a Markdown table with a row for each victim and a column for each launcher."""
    each = tallies.values()
    rows = {f"kills of {victim}": [str(tally.kills[victim]) for tally in each] for victim in VICTIMS} | {
        "runs that were resumed until they were complete": [str(tally.num_runs) for tally in each],
        "of these, equal to the run that was not killed": [str(tally.num_runs - tally.num_different) for tally in each],
        "longest time from a kill to the end of all processes": [f"{tally.longest_s:.1f} s" for tally in each],
    }
    if is_in_store:
        rows["attempts with an empty disk"] = [str(tally.num_empty_disks) for tally in each]
        rows["faults"] = [str(tally.faults.total()) for tally in each]
        rows[CHANGED_OR_LEFT] = [str(len(tally.others)) for tally in each]
    lines = [f"| {head} | {' | '.join(cells)} |" for head, cells in rows.items()]
    return "\n".join([f"| | {' | '.join(tallies)} |", "|---|" + "---:|" * len(tallies), *lines])


def main() -> None:
    """Drill under each launcher that is installed, print a table, and exit with 1 if a run was different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of each victim under each launcher")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="put the logdirs on an S3 server, and inject faults")
    parser.add_argument("--page", type=Path, help="also write the table to this page")
    options = parser.parse_args()
    tallies = {}
    with ExitStack() as running:
        name = running.enter_context(tempfile.TemporaryDirectory())
        server = running.enter_context(serving("tests.storage.s3_server")) if options.store else None
        faults = running.enter_context(proxy.running(server)) if server is not None else None
        whole = Path(name) / "whole"
        assert attempt("plain python", whole, None, 0.0, Tally(2)), "the run fails by itself"
        expected = fingerprint(whole)
        for launcher, command in LAUNCHERS.items():
            if shutil.which(command[0]) is not None:
                tallies[launcher] = drill(
                    launcher, options.kills, folder=Path(name), expected=expected, seed=options.seed,
                    server=server, faults=faults,
                )  # fmt: skip
    wrong = [line for tally in tallies.values() for line in (*tally.different, *tally.others)]
    section = "launched store drills" if options.store else "launched drills"
    report(table(tallies, is_in_store=options.store), wrong, section, options.page)


if __name__ == "__main__":
    main()
