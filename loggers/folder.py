"""Loggers that write to a folder: what they take; the folder is made in time, and never another run's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from runnerkit.arguments import check_paths
from runnerkit.logger import ILogger
from runnerkit.storage.links import refuse_link


class FolderLogger(ILogger):
    """Base of loggers that write to a logdir.

    Args:
        logdir: made when the run starts.
        log_batch_metrics: log single training steps too.
        log_epoch_metrics: log whole loaders.
    """

    logdir: Path

    def __init__(
        self, logdir: str | os.PathLike[str], *, log_batch_metrics: bool = False, log_epoch_metrics: bool = True
    ) -> None:
        check_paths(self, logdir=logdir)
        self.logdir = Path(logdir).absolute()  # the run may change its working directory
        self.log_batch_metrics = log_batch_metrics
        self.log_epoch_metrics = log_epoch_metrics


def claim_folder(folder: Path, *, logdir: Path, earlier_logs: Iterable[Path], is_resumed: bool) -> None:
    """Make `folder`, and see that it is this run's to write to.

    Args:
        folder: the logdir, or a folder in it.
        earlier_logs: files that only an earlier run can have left.
        is_resumed: the run goes on from a checkpoint, so earlier logs are its own.
    Raises:
        FileExistsError: another run's logs are there.
        OSError: the folder cannot be made or written to, or one of the logs is a symbolic link.
    """
    logs = list(earlier_logs)
    for path in [*({folder} - {logdir}), *logs]:
        refuse_link(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot make {folder} ({error.strerror}): pass another logdir") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write to {folder}: pass another logdir")
    if logs and not is_resumed:
        raise FileExistsError(
            f"{logdir} holds the logs of another run ({logs[0].name}): "
            'pass resume="auto" to go on with that run, or choose another logdir'
        )
