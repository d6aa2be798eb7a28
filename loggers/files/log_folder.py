"""Base class of loggers that write to a logdir, and the check that the logdir belongs to this run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from runnerkit.logger import ILogger
from runnerkit.storage.links import refuse_links
from runnerkit.storage.remote.urls import local_path, shown
from runnerkit.support.arguments import check_paths


class FolderLogger(ILogger):
    """Base class of loggers that write to a logdir.

    Args:
        logdir: created when the run starts.
        log_batch_metrics: log the metrics of training steps too.
        log_epoch_metrics: log the metrics of each pass over a loader.
    """

    logdir: Path

    def __init__(
        self, logdir: str | os.PathLike[str], *, log_batch_metrics: bool = False, log_epoch_metrics: bool = True
    ) -> None:
        check_paths(self, logdir=logdir)
        self.logdir = local_path(logdir)  # absolute: the run may change its working directory
        self.log_batch_metrics = log_batch_metrics
        self.log_epoch_metrics = log_epoch_metrics


def claim_folder(folder: Path, *, logdir: Path, earlier_logs: Iterable[Path], is_resumed: bool) -> None:
    """Create `folder`, and check that it holds no logs of another run.

    Args:
        folder: the logdir, or a folder in it.
        earlier_logs: existing files that only an earlier run can have written.
        is_resumed: True if the run resumes from a checkpoint, so that the earlier logs belong to it.
    Raises:
        FileExistsError: the folder holds the logs of another run.
        OSError: the folder cannot be created or written to, or a log is a symbolic link.
    """
    logs = list(earlier_logs)
    for path in [*({folder} - {logdir}), *logs]:
        refuse_links(path, below=logdir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot create {folder} ({error.strerror}): pass another logdir") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write to {folder}: pass another logdir")
    if logs and not is_resumed:
        raise FileExistsError(
            f"{shown(logdir)} holds the logs of another run ({logs[0].name}): "
            'pass resume="auto" to continue that run, or choose another logdir'
        )
