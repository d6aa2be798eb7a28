"""A copy of this checkout, in which a test may build and write: others read and build this one at the same time."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def committed() -> list[str]:
    """Return the paths that git would commit, tracked, new and links; skip the test outside a repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository, to know its files")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in names.split("\0") if name and os.path.lexists(ROOT / name)]


def copy_of_checkout(folder: Path) -> Path:
    """Copy what git would commit to a new folder; return it."""
    for name in committed():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder
