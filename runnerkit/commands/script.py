"""Execution of a script on an engine chosen on the command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from runnerkit.engines.by_name import VARIABLE, engine_by_name


def run_script(
    path: Path,
    arguments: Sequence[str],
    *,
    name: str | None,
    num_processes: int | None,
    precision: str | None,
    launcher: str | None,
) -> NoReturn:
    """Replace this process by ``python path arguments``, in which every run uses the requested engine, if any.

    Raises:
        FileNotFoundError: the script does not exist.
        ValueError, ImportError: the engine is unknown, or this machine does not meet its requirements.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    command: dict[str, Any] = {
        "name": name, "num_processes": num_processes, "precision": precision, "launcher": launcher,
    }  # fmt: skip
    environment = dict(os.environ)
    if any(each is not None for each in command.values()):
        # Raise here, in one line, rather than in the script, with a traceback.
        try:
            engine_by_name(**command).check()
        except RuntimeError as error:
            raise ValueError(f"engine {name!r}: {error}") from error
        environment[VARIABLE] = json.dumps(command)
    os.execve(sys.executable, [sys.executable, str(path), *arguments], environment)
