"""The git commit of the user's code and its uncommitted changes, without credentials."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from runnerkit.support.redacted_code import redacted_lines

_TIMEOUT_S = 5.0  # of a git command; a run does not wait longer for a slow file system
_MAX_CHARACTERS = 100_000  # of a diff
_BIG_FILE = "1m"  # git treats larger files as binary: their lines are neither read nor printed
_PACKAGE = Path(__file__).resolve().parents[1]
# Files that usually hold credentials, and folders of such files.
_LEFT_OUT = (
    ".env*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "id_rsa*", "id_ecdsa*", "id_ed25519*",
    ".netrc", ".npmrc", ".pypirc", ".pgpass", ".htpasswd", "kaggle.json", "*service_account*", "*secret*",
    "*credential*",
)  # fmt: skip


def describe_commit() -> dict[str, Any]:
    """Return the commit, the branch, and whether tracked files may differ from it; empty outside a git repository.

    `has_changes` is None if git does not tell in time.

    The repository is that of the script, or else of the working directory, when first asked in this process.

    >>> set(describe_commit()) <= {"commit", "branch", "has_changes"}
    True
    """
    commit, branch, has_changes, _ = _state(*_folders())
    return {"commit": commit, "branch": branch, "has_changes": has_changes} if commit else {}


def uncommitted_diff() -> str:
    """Return the diff of tracked files to the commit, without credentials and files that usually hold some.

    A diff of more than 100,000 characters is cut.

    >>> isinstance(uncommitted_diff(), str)
    True
    """
    return _state(*_folders())[3]


def _folders() -> tuple[str, str]:
    """Return the folder of the user's script, if there is one, and the working directory; "" if it was deleted."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return "", ""
    script = (Path(sys.argv[0]) if sys.argv else Path()).resolve()
    is_script = script.suffix == ".py" and script.is_file()
    # Of ``python -m runnerkit`` and of a notebook it is a file of a package, which may lie in another repository.
    is_installed = script.is_relative_to(_PACKAGE) or {"site-packages", "dist-packages"} & {*script.parts}
    return str(script.parent) if is_script and not is_installed else here, here


@cache  # the state at the start is that of the code that runs; files may be edited since
def _state(folder: str, otherwise: str) -> tuple[str, str, bool | None, str]:
    """Return the commit, the branch, whether there are changes, and the diff."""
    named = _git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD") if folder else None
    commit, _, branch = (named or "").strip().partition("\n")
    if not commit:
        return _state(otherwise, otherwise) if folder != otherwise else ("", "", None, "")
    changed = _git(folder, "diff", "HEAD", "--name-only", "--", ":(top)")
    if not changed:
        return commit, branch, None if changed is None else False, ""
    excluded = [f":(top,exclude,glob,icase)**/{name}{rest}" for name in _LEFT_OUT for rest in ("", "/**")]
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--", ":(top)", *excluded)
    return commit, branch, True, redacted_diff(diff or "")


def _git(folder: str, *words: str) -> str | None:
    """Return what git prints; None if it fails, is not installed or takes too long."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    options = ["-c", "core.fsmonitor=false", "-c", f"core.bigFileThreshold={_BIG_FILE}", "-C", folder]
    try:
        done = subprocess.run(
            ["git", *options, *words],
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
    return "\n".join(redacted_lines(lines))
