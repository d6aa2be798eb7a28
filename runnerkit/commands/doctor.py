"""`runnerkit doctor`: whether what lies in a logdir is whole, and what a run would resume from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runnerkit.commands.checkpoint_check import check_checkpoints
from runnerkit.commands.finding import Finding
from runnerkit.commands.log_check import check_logs
from runnerkit.storage.logdir_lock import FILE, holder, is_held

_TRACES = ("checkpoints", "csv", "tensorboard", "hparams.yml")  # by which a logdir is known


@dataclass(frozen=True)
class Report:
    """What was found; as a string, a line for each finding and a last one."""

    logdir: Path
    findings: list[Finding]

    @property
    def num_broken(self) -> int:
        """How many findings are of something broken."""
        return sum(finding.verdict == "BROKEN" for finding in self.findings)

    def __str__(self) -> str:
        last = f"{self.num_broken} findings are BROKEN" if self.num_broken else "all is good"
        return "\n".join([*map(str, self.findings), f"{self.logdir}: {last}"])


def examine(logdir: str | os.PathLike[str]) -> Report:
    """Read all checkpoints and logs of one run, and change nothing.

    Raises:
        FileNotFoundError: that is no logdir.

    >>> import tempfile
    >>> from runnerkit.loggers import CSVLogger
    >>> logger = CSVLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> print(examine(logger.logdir).findings[0])
    note    checkpoints: there is none: nothing to resume from
    """
    logdir = Path(logdir)
    if not any((logdir / name).exists() for name in _TRACES):
        raise FileNotFoundError(f"{logdir} is no logdir of a run: it has none of {', '.join(_TRACES)}")
    return Report(logdir, [*_check_lock(logdir), *check_checkpoints(logdir), *check_logs(logdir)])


def _check_lock(logdir: Path) -> Iterator[Finding]:
    owner = holder(logdir)
    if owner is None:
        return
    if is_held(logdir):
        yield Finding("note", FILE, f"a run is writing here, {owner}: what it has half done is told of as broken")
    else:
        yield Finding("note", FILE, f"left by a killed run, {owner}; it blocks nobody")
