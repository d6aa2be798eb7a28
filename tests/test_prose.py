"""Docstrings, comments, messages and pages read as plain English."""

from pathlib import Path

import pytest

from tests.prose import ROOT, files, matches


def test_no_pattern_of_crude_prose_is_left():
    """The patterns that tests/prose.py lists do not come back."""
    found = [f"{path.relative_to(ROOT)}:{each}" for path in files() for each in matches(path)]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("a.py", '"""Whether a run can resume."""', "start with a verb or a noun"),
        ("a.py", "# This loader\n# is no loader.\n", "negate the verb"),
        ("a.py", 'raise ValueError(f"{x} is no integer")', "negate the verb"),
        ("a.md", "Pass seeds, say.\n\n```\nis no\n```\n", "for example"),
        ("a.md", "A loop that you\nwrote by hand.", "hand-written"),
    ],
)
def test_a_pattern_is_found(tmp_path: Path, name: str, text: str, advice: str):
    """Also across the lines of a comment or paragraph; not in code."""
    (tmp_path / name).write_text(text, encoding="utf-8")

    (found,) = matches(tmp_path / name)

    assert advice in found


def test_good_prose_is_not_found(tmp_path: Path):
    (tmp_path / "a.md").write_text(
        "There is no such file. It is no longer there. This is not an integer.", encoding="utf-8"
    )

    assert not list(matches(tmp_path / "a.md"))
