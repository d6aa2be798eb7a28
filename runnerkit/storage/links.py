"""Rejection of symbolic links inside a logdir, where anyone with write access can plant them."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def refuse_link(path: Path) -> None:
    """Raise if a file or folder of a run is a symbolic link: the run would overwrite and delete its target.

    The logdir itself may be one.

    Raises:
        OSError: it is a symbolic link.
    """
    if path.is_symlink():
        raise OSError(
            errno.ELOOP,
            f"{path} is a symbolic link to {os.readlink(path)}: a run would overwrite and delete files there; delete "
            "the link (to keep a run on another disk, pass a logdir there, or make the logdir itself the link)",
        )


def refuse_links(path: Path, *, below: Path) -> None:
    """Raise if `path`, or a folder between it and the folder `below`, is a symbolic link.

    Raises:
        OSError: it is a symbolic link.
    """
    for each in (path, *path.parents):
        if each == below:
            return
        refuse_link(each)
