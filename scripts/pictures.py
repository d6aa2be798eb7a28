"""Draw the pictures of docs/curves.md: ``runnerkit watch`` in a terminal, and the upper part of a report.

    python examples/demo.py --limit 6000 --epochs 8 --logdir logs/batch_size=64
    python scripts/pictures.py logs/batch_size=64

``make screenshots`` does both. The report needs Debian's chromium.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console

from runnerkit import write_report
from runnerkit.commands.watch import watch

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT = 96, 26  # characters
PAGE = {"width": 886, "height": 1165}  # pixels
NUM_COLORS = 64
FONTS_AND_COMMENT = re.compile(r"\s*(@font-face \{.*?\n    \}|<!--.*?-->)", flags=re.DOTALL)


def watch_svg(logdir: Path) -> str:
    """Return the picture of a terminal; it loads nothing, such as the fonts that rich refers to."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(width=WIDTH, height=HEIGHT, record=True, file=nowhere)
        watch(logdir, once=True, console=console)
    svg = console.export_svg(title=f"runnerkit watch {logdir}", unique_id="watch")
    return FONTS_AND_COMMENT.sub("", svg)


def write_page(logdir: Path, path: Path) -> None:
    """Write the picture of the upper part of a report, as a browser shows it."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = write_report(logdir, path=Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport=PAGE)
            page.goto(report.absolute().as_uri())
            page.screenshot(path=path)
        finally:
            browser.close()
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(NUM_COLORS)
    small.save(path, optimize=True)


if __name__ == "__main__":
    run = Path(sys.argv[1])
    (IMAGES / "watch.svg").write_text(watch_svg(run), encoding="utf-8")
    write_page(run, IMAGES / "report.png")
