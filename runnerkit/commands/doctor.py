"""`runnerkit doctor`: checks that the files of a logdir are intact, and names the checkpoint to resume from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runnerkit.commands.checkpoint_check import check_checkpoints
from runnerkit.commands.finding import Finding
from runnerkit.commands.log_check import check_logs
from runnerkit.history import json_lines
from runnerkit.storage.logdir_lock import FILE, holder, is_held
from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.remote.urls import as_url, shown

_TRACES = ("checkpoints", "csv", "tensorboard", "hparams.yml", json_lines.FILE)  # any of these marks a logdir


@dataclass(frozen=True)
class Report:
    """Findings about one logdir; as a string, one line each and a summary."""

    logdir: Path
    findings: list[Finding]

    @property
    def num_broken(self) -> int:
        """Number of findings with the verdict BROKEN."""
        return sum(finding.verdict == "BROKEN" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        findings = [asdict(finding) for finding in self.findings]
        return {"logdir": shown(self.logdir), "num_broken": self.num_broken, "findings": findings}

    def __str__(self) -> str:
        last = f"{self.num_broken} findings are BROKEN" if self.num_broken else "all is good"
        return "\n".join([*map(str, self.findings), f"{shown(self.logdir)}: {last}"])


def examine(logdir: str | os.PathLike[str]) -> Report:
    """Check all checkpoints and logs of one run without changing them.

    Raises:
        FileNotFoundError: `logdir` is not the logdir of a run.

    >>> import tempfile
    >>> from runnerkit.loggers import CSVLogger
    >>> logger = CSVLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> print(examine(logger.logdir).findings[0])
    note    checkpoints: does not exist: nothing to resume from
    """
    url, logdir = as_url(logdir), local_copy(logdir)
    if not any((logdir / name).exists() for name in _TRACES):
        raise FileNotFoundError(
            f"{url or logdir} is not the logdir of a run: expected one of {', '.join(_TRACES)} in it"
        )
    lock = _check_lock(logdir) if url is None else _check_lease(url)
    return Report(Path(logdir), [*lock, *check_checkpoints(logdir), *check_logs(logdir)])


def _check_lease(url: str) -> Iterator[Finding]:
    from runnerkit.storage.remote import lease
    from runnerkit.storage.remote.manifest import LEASE
    from runnerkit.storage.remote.store import Store

    owner = lease.holder(Store(url))
    if owner is not None:
        yield Finding("note", LEASE, f"a run is writing here, {owner}, or was killed; then it blocks none for long")


def _check_lock(logdir: Path) -> Iterator[Finding]:
    owner = holder(logdir)
    if owner is None:
        return
    if is_held(logdir):
        yield Finding("note", FILE, f"a run is writing here, {owner}: its unfinished files are reported as broken")
    else:
        yield Finding("note", FILE, f"left by a killed run, {owner}; it does not block other runs")
