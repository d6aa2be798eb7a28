"""Tests of scripts/run_tests.py, through which .ci/run runs what failed once more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "scripts" / "run_tests.py"
FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_flaky(number):
    seen = Path(f"seen{{number}}")
    is_first = not seen.exists()
    seen.touch()
    assert not is_first, "a port was taken"
"""


@pytest.fixture
def ran(tmp_path):
    """Return a function that runs a file of tests and returns the exit code and the texts of first failures."""

    def run(tests, *options):
        (tmp_path / "test_it.py").write_text(tests)
        pytest_command = [sys.executable, "-m", "pytest", "test_it.py", *options]
        command = [sys.executable, SCRIPT, "again", sys.executable, *pytest_command]
        # Without the plugins of this environment, which take seconds to import.
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        code = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120).returncode
        return code, [path.read_text() for path in sorted((tmp_path / "again").glob("*.txt"))]

    return run


def test_what_passes_at_once_is_not_listed(ran):
    assert ran("def test_it(): pass") == (0, [])


def test_what_passes_when_run_again_is_listed_with_its_first_failure(ran):
    """The run succeeds, and nobody has to search the log for the reason."""
    code, [text] = ran(FLAKY.format(count=1))

    assert code == 0
    assert "test_flaky[0]" in text and "a port was taken" in text


@pytest.mark.parametrize(
    "tests",
    ["def test_it(): assert False", FLAKY.format(count=4), "import os\ndef test_it(): os._exit(3)", "syntax error"],
    ids=["fails twice", "more than three flaky tests", "breaks", "cannot be parsed"],
)
def test_what_is_not_a_flaky_test_fails_the_run(ran, tests):
    code, texts = ran(tests)

    assert code != 0 and texts == []


def test_an_unknown_option_fails_the_run(ran):
    code, _ = ran("def test_it(): pass", "--no-such-option")

    assert code != 0
