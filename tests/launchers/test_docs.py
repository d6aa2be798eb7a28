"""docs/launchers.md and the tests stay consistent."""

from pathlib import Path

import pytest

from tests.launchers.docs import headings

TESTS = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_docs.py")


@pytest.mark.parametrize("heading", headings())
def test_every_command_of_the_page_is_run_by_a_test(heading):
    """A test finds a command by the heading above it on the page, so renaming a heading fails that test."""
    assert f'"{heading}"' in TESTS
