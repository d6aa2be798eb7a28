"""Tests of scripts/pictures.py, which draws the pictures of docs/curves.md."""

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

from tests.runs import log_run

ROOT = Path(__file__).parents[1]
CURVES = {"train": {"loss": [0.9, 0.5, 0.25]}, "valid": {"loss": [0.8, 0.7, 0.75], "accuracy": [0.5, 0.75, 0.625]}}


def test_the_picture_of_a_terminal_loads_nothing(tmp_path, monkeypatch):
    """rich refers to fonts of another site; the picture has the title, the curves and the colors of watch."""
    monkeypatch.chdir(tmp_path)
    log_run(Path("logs", "digits"), CURVES)
    watch_svg = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))["watch_svg"]

    svg = watch_svg(Path("logs", "digits"))

    assert re.findall(r"https?:[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    assert "@font-face" not in svg and "font-family: Fira Code" in svg
    text = " ".join("".join(ElementTree.fromstring(svg).itertext()).replace("\N{NO-BREAK SPACE}", " ").split())
    assert "runnerkit watch logs/digits" in text and "loss train 0.25 valid 0.75" in text
