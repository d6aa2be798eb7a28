"""States of runs beside their numbers: of those that have not finished, and of those that logged nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from runnerkit.history.frame import Logdirs, folders_of, name_in
from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.status_file import describe, folders_with_status, read_status


def all_runs(logdir: Logdirs, found: Mapping[str, Path]) -> dict[str, Path]:
    """Return `found`, the runs of `find_runs`, and those with a status file that logged nothing, as failed ones."""
    runs = dict(found)
    known = {path.resolve() for path in runs.values()}
    for folder in (local_copy(each, logs_only=True) for each in folders_of(logdir)):
        for path in folders_with_status(folder):
            if path.resolve() not in known:
                runs.setdefault(name_in(folder, path), path)
    return runs


def states_of(logdir: Logdirs, found: Mapping[str, Path], *, logged: Collection[str]) -> dict[str, str]:
    """Describe by name the runs that have not finished, or that are not among those with numbers, `logged`.

    Args:
        found: the runs of `find_runs`.
    """
    states: dict[str, str] = {}
    for run, path in all_runs(logdir, found).items():
        status = read_status(path)
        words = ["nothing is logged"] if run not in logged else []
        if status is not None and status["state"] != "finished":
            words.append(describe(status))
        if words:
            states[run] = ", ".join(words)
    return states
