"""States of runs beside their numbers: of those that have not finished, and of those that logged nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from runnerkit.history.frame import Logdirs, find_runs, folders_of, name_in
from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.status_file import FILE, describe, read_status


def all_runs(logdir: Logdirs) -> dict[str, Path]:
    """Return the runs of `find_runs`, and those that have a status file but have logged nothing, such as failed ones.

    Raises:
        as `find_runs`.
    """
    runs = find_runs(logdir)
    known = {path.resolve() for path in runs.values()}
    for folder in (local_copy(each, logs_only=True) for each in folders_of(logdir)):
        for path in (file.parent for file in sorted(folder.rglob(FILE))):
            if path.resolve() not in known:
                runs.setdefault(name_in(folder, path), path)
    return runs


def states_of(logdir: Logdirs, *, logged: Collection[str]) -> dict[str, str]:
    """Describe by name the runs that have not finished, or that are not among those with numbers, `logged`."""
    states: dict[str, str] = {}
    for run, path in all_runs(logdir).items():
        status = read_status(path)
        words = ["nothing is logged"] if run not in logged else []
        if status is not None and status["state"] != "finished":
            words.append(describe(status))
        if words:
            states[run] = ", ".join(words)
    return states
