"""MkDocs hook: the header names the version, and the repository if the checkout was cloned from one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from runnerkit.version import __version__


def on_config(config):
    """Add the version, and the link to the repository."""
    config.site_name = f"{config.site_name} {__version__}"
    config.repo_url = config.repo_url or repository(Path(config.config_file_path).parent)
    if config.repo_url:
        config.repo_name = "/".join(config.repo_url.split("/")[3:])
    return config


def repository(checkout: Path) -> str | None:
    """Return the address of the remote `origin` for a browser, without credentials; None if there is none."""
    command = ["git", "-C", str(checkout), "remote", "get-url", "origin"]
    try:
        remote = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.fullmatch(r"(?:https://|ssh://|)(?:[^@/]*@)?([\w.-]+\.\w+)(?::\d+)?[:/](.+?)(?:\.git)?/?", remote)
    return f"https://{found[1]}/{found[2]}" if found else None
