"""Add ``llms.txt``, the list of the documentation's pages, to the wheel; everything else is in setup.cfg."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithListOfPages(build_py):
    """The usual build, and one generated file."""

    def run(self) -> None:
        """Build."""
        super().run()
        if not self.editable_mode:
            llms_txt = runpy.run_path(str(ROOT / "runnerkit" / "commands" / "docs_pages.py"))["llms_txt"]
            Path(self.build_lib, "runnerkit", "llms.txt").write_text(llms_txt(ROOT / "docs"), encoding="utf-8")


setup(cmdclass={"build_py": BuildWithListOfPages})
