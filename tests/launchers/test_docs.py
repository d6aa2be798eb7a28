"""docs/launchers.md and the tests do not drift apart."""

from pathlib import Path

import pytest

from tests.launchers.docs import headings

TESTS = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_docs.py")


@pytest.mark.parametrize("heading", headings())
def test_every_command_of_the_page_is_run_by_a_test(heading):
    """A test takes it from the page, by the heading above it; a renamed heading fails there."""
    assert f'"{heading}"' in TESTS
