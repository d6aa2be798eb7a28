"""A script that is run on an engine of the command line's choice."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runnerkit.engines.by_name import VARIABLE, engine_by_name


def run_script(
    path: Path, arguments: Sequence[str], *, name: str | None, num_processes: int | None, precision: str | None
) -> NoReturn:
    """Become ``python path arguments``, in which every run takes the engine that was asked for, if one was.

    Raises:
        FileNotFoundError: there is no script.
        ValueError, ImportError: there is no such engine, or this machine lacks what it needs.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    command = {"name": name, "num_processes": num_processes, "precision": precision}
    environment = dict(os.environ)
    if any(each is not None for each in command.values()):
        # Refuses here what it would refuse there.
        try:
            engine_by_name(name, num_processes=num_processes, precision=precision).check()
        except RuntimeError as error:
            raise ValueError(f"engine {name!r}: {error}") from error
        environment[VARIABLE] = json.dumps(command)
    os.execve(sys.executable, [sys.executable, str(path), *arguments], environment)
