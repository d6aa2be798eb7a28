"""Tests that docs/tutorial/first_run.md runs outside of the checkout, from pip to TensorBoard.

By default the new environment links all packages of this one except runnerkit. If RUNNERKIT_WHEEL names a wheel, as
in scripts/check_wheel.sh, the environment is empty and pip downloads the requirements.
"""

import json
import os
import re
import signal
import site
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.checkout import ROOT, copy_of_checkout
from tests.test_docs import blocks

PAGE = ROOT / "docs" / "tutorial" / "first_run.md"
(MAKE_ENVIRONMENT, *INSTALL), [TRAIN], (TABLE, DRAW, SHOW) = map(str.splitlines, blocks(PAGE, "bash"))
PROGRAMS = blocks(PAGE, "python")
WHEEL = os.environ.get("RUNNERKIT_WHEEL")

pytestmark = pytest.mark.slow


class Newcomer:
    """A user with a folder and a shell."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, commands):
        """Start commands in the environment of the page, once it exists."""
        script = f"set -e; [ ! -d env ] || . env/bin/activate; {commands}"
        return subprocess.Popen(
            ["bash", "-c", script], cwd=self.folder, env=self.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, commands):
        """Run commands and return their output."""
        process = self.start(commands)
        try:
            output, _ = process.communicate()
        except BaseException:  # the test's time limit
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        assert process.returncode == 0, output
        return output

    def install(self):
        """Install as on the page, with pip's --find-links for a version that is not on PyPI."""
        self.run(MAKE_ENVIRONMENT)
        if WHEEL is None:
            checkout = copy_of_checkout(self.folder.with_name(f"{self.folder.name}-checkout"))
            self.run(f"{sys.executable} -m build --no-isolation --wheel --outdir dist {checkout}")
            lend_packages(self.folder / "env")
            self.environment["PIP_NO_INDEX"] = "1"
        else:
            self.environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
        dist = self.folder / "dist" if WHEEL is None else Path(WHEEL).parent
        self.run("\n".join(INSTALL).replace("pip install", f"pip install --find-links {dist}"))


def lend_packages(environment):
    """Link all packages except runnerkit into a new environment, so that nothing is downloaded."""
    [theirs] = (environment / "lib").glob("python*/site-packages")
    for path in (path for folder in site.getsitepackages() for path in Path(folder).glob("*")):
        if "runnerkit" not in path.name and path.suffix != ".pth" and not (theirs / path.name).exists():
            (theirs / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """Return a user who has followed the page up to its first program."""
    somebody = Newcomer(tmp_path_factory.mktemp("newcomer"))
    somebody.install()
    return somebody


@pytest.fixture(scope="module")
def printed(newcomer):
    """Return the output of the first training."""
    (newcomer.folder / "train.py").write_text(PROGRAMS[0], encoding="utf-8")
    return newcomer.run(TRAIN)


def test_it_is_installed_with_all_that_it_requires(newcomer):
    """The package, its engines folder (a link in the checkout) and the command are installed in the new environment."""
    where = newcomer.run("python -P -c 'import runnerkit.engines; print(runnerkit.engines.__file__)'")

    assert Path(where.strip()).is_relative_to(newcomer.folder / "env")
    assert Path(where.strip()).read_bytes() == (ROOT / "engines" / "__init__.py").read_bytes()
    assert newcomer.run("runnerkit --version").startswith("runnerkit 0.")
    if WHEEL is not None:
        assert "No broken requirements found." in newcomer.run("pip check")


def shapes(text):
    """Split the lines into words, with numbers replaced by N."""
    return [re.sub(r"\d[\d.e-]*", "N", line).split() for line in text.splitlines()]


def test_a_model_is_trained(newcomer, printed):
    """Training prints the page's output; a second call reports that the run is complete, as on the page."""
    assert shapes(printed) == shapes(blocks(PAGE, "text")[0])
    assert (newcomer.folder / "logs" / "first" / "checkpoints" / "best.pth").exists()
    assert shapes(newcomer.run(TRAIN)) == shapes(blocks(PAGE, "text")[1])


def test_its_curves_are_a_table_and_a_picture(newcomer, printed):
    """One command each prints the table and draws the picture of the curves."""
    assert "accuracy03" in newcomer.run(TABLE)

    newcomer.run(DRAW)

    assert (newcomer.folder / "logs" / "first" / "metrics.png").read_bytes().startswith(b"\x89PNG\r\n")


def ask_tensorboard(address, what, *, until):
    """Query the TensorBoard server until the answer is complete, because it loads the logs in the background."""
    deadline = time.monotonic() + 60
    while not until(answer := urllib.request.urlopen(f"{address}/{what}").read().decode()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)
    return answer


def test_tensorboard_shows_a_run_for_each_loader(newcomer, printed):
    """TensorBoard serves its page and a run with loss and accuracy for each loader."""
    server = newcomer.start(f"exec {SHOW} --port 0")
    try:
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://localhost:\d+", line)))
        page = ask_tensorboard(address, "", until=bool)
        runs = json.loads(ask_tensorboard(address, "data/runs", until=lambda answer: len(json.loads(answer)) == 2))
        both = {"train", "valid"}
        tags = ask_tensorboard(
            address, "data/plugin/scalars/tags", until=lambda answer: all(key in answer for key in both)
        )
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.communicate(timeout=30)

    assert "<title>TensorBoard</title>" in page
    assert set(runs) == {f"first/tensorboard/{key}" for key in both}
    assert all(f"`{run}`" in PAGE.read_text(encoding="utf-8") for run in runs)
    assert all({"loss", "accuracy"} <= set(each) for each in json.loads(tags).values())


def test_the_rest_of_the_page_runs_too(newcomer, printed):
    """All programs of the page run in order as one script."""
    (newcomer.folder / "all.py").write_text("\n".join(PROGRAMS), encoding="utf-8")

    newcomer.run("python all.py")


@pytest.mark.skipif(WHEEL is None, reason="needs the wheel of scripts/check_wheel.sh; other tests cover the checkout")
def test_two_processes_are_trained_by_the_wheel(newcomer, printed):
    """With `ddp=True`, the spawned processes import the installed wheel."""
    program = PROGRAMS[0].replace('logdir="logs/first"', 'logdir="logs/two", ddp=True, cpu=True')
    (newcomer.folder / "two.py").write_text(program, encoding="utf-8")

    (start, *lines), (_, *expected) = shapes(newcomer.run("python two.py")), shapes(printed)
    assert start[:4] == ["started:", "DistributedDataParallelEngine,", "N", "processes,"] and lines == expected
    environment = json.loads((newcomer.folder / "logs" / "two" / "environment.json").read_text(encoding="utf-8"))
    assert environment["engine"]["num_processes"] == 2
