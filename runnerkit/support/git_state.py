"""The git commit of the user's code and its uncommitted changes, without credentials."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from runnerkit.support.redaction import redacted

_TIMEOUT_S = 5.0  # of a git command; a run does not wait longer for a slow file system
_MAX_CHARACTERS = 100_000  # of a diff
_ITEM = r"""([\w-]+)(["']\]\s*=\s*["'])([^"']+)"""  # a name in brackets and its value
# Files that usually hold credentials.
_LEFT_OUT = ("**/.env*", "**/*.pem", "**/*.key", "**/id_rsa*", "**/.netrc", "**/*secret*", "**/*credential*")


def describe_commit() -> dict[str, Any]:
    """Return the commit, the branch, and whether tracked files may differ from it; empty outside a git repository.

    The repository is that of the script, or else of the working directory, when first asked in this process.

    >>> set(describe_commit()) <= {"commit", "branch", "has_changes"}
    True
    """
    commit, branch, _, has_changes = _state(*_folders())
    return {"commit": commit, "branch": branch, "has_changes": has_changes} if commit else {}


def uncommitted_diff() -> str:
    """Return the diff of tracked files to the commit, without credentials and files that usually hold some.

    A diff of more than 100,000 characters is cut.

    >>> isinstance(uncommitted_diff(), str)
    True
    """
    return _state(*_folders())[2]


def _folders() -> tuple[str, str]:
    """Return the folder of the script, if there is one, and the working directory."""
    script = Path(sys.argv[0]) if sys.argv else Path()
    here = os.getcwd()
    return str(script.resolve().parent) if script.suffix == ".py" and script.is_file() else here, here


@cache  # the state at the start is that of the code that runs; files may be edited since
def _state(folder: str, otherwise: str) -> tuple[str, str, str, bool]:
    """Return the commit, the branch, the diff and whether there are changes, also if the diff does not show them."""
    commit, _, branch = (_git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD") or "").strip().partition("\n")
    if not commit:
        return _state(otherwise, otherwise) if folder != otherwise else ("", "", "", False)
    excluded = [f":(top,exclude,glob,icase){pattern}" for pattern in _LEFT_OUT]
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--", ":(top)", *excluded)
    # Files are left out of the diff, and on a slow file system it is not known.
    has_changes = bool(diff) or _git(folder, "status", "--porcelain", "--untracked-files=no") != ""
    return commit, branch, redacted_diff(diff or ""), has_changes


def _git(folder: str, *words: str) -> str | None:
    """Return what git prints; None if it fails, is not installed or takes too long."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", folder, *words],
            capture_output=True, timeout=_TIMEOUT_S, check=True, env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def redacted_diff(diff: str) -> str:
    """Copy a diff, cut if it is long; in each line, values of names like ``api_key`` and tokens become "***".

    >>> print(redacted_diff('+    API_KEY = "abc"\\n+os.environ["HF_TOKEN"] = "abc"\\n-lr = 0.1'))
    +    API_KEY = "***"
    +os.environ["HF_TOKEN"] = "***"
    -lr = 0.1
    """
    lines = diff[:_MAX_CHARACTERS].splitlines()
    if len(diff) > _MAX_CHARACTERS:
        lines[-1] = f"... {len(diff) - _MAX_CHARACTERS:,} more characters"
    return "\n".join(map(_redacted_line, lines))


def _redacted_line(line: str) -> str:
    text = line.lstrip("+- \t")  # a name at the start of a text is recognized
    return line[: len(line) - len(text)] + re.sub(_ITEM, _redacted_item, redacted(text))


def _redacted_item(item: re.Match[str]) -> str:
    name, between, value = item.groups()
    return f"{name}{between}{redacted({name: value})[name]}"
