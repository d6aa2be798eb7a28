"""Tests that the first pages say what their code is: lines, widths and the difference of two programs."""

import difflib
import re

import pytest

from tests.test_docs import ROOT, blocks

PAGES = [ROOT / "docs" / f"{name}.md" for name in ("hugging_face", "image_classification", "tabular", "quick_port")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_fits_the_page(page):
    """No line is wider than 80 columns."""
    lines = "\n".join(blocks(page, "python") + blocks(page, "bash") + blocks(page, "text")).splitlines()

    assert lines and [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_read_in_five_minutes(page):
    """About 200 words a minute, code included."""
    assert len(re.findall(r"\w{2,}", page.read_text(encoding="utf-8"))) < 1000


def test_hugging_face_takes_thirty_lines():
    assert len([line for line in blocks(PAGES[0], "python")[0].splitlines() if line]) <= 30


def test_the_lines_of_the_two_programs_are_counted():
    """Programs that stand side by side are narrow, and the page says how many lines differ."""
    page = PAGES[3]
    before, after = ([line for line in block.splitlines() if line] for block in blocks(page, "python")[1:3])

    difference = list(difflib.ndiff(before, after))

    assert max(map(len, before + after)) <= 60
    removed, added = (sum(line.startswith(f"{sign} ") for line in difference) for sign in "-+")
    counts = f"Of its {len(before)} lines, {removed} are removed; {added} are added"
    assert counts in page.read_text(encoding="utf-8")
