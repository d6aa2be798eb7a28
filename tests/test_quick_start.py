"""docs/index.md by itself: its commands as they stand, where nothing of the checkout is, from pip to TensorBoard."""

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

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "index.md"


class Newcomer:
    """A folder and a shell; pip finds the built wheel and asks nobody else."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(folder / "dist"),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, commands):
        """In the environment that the page has made, if it has."""
        script = f"set -e; [ ! -d env ] || . env/bin/activate; {commands}"
        return subprocess.Popen(
            ["bash", "-c", script], cwd=self.folder, env=self.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, commands):
        """Return what they print."""
        process = self.start(commands)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        return output


def lend_packages(environment):
    """Link this environment's packages into a new one, all but runnerkit, so that nothing is downloaded."""
    [theirs] = (environment / "lib").glob("python*/site-packages")
    for path in (path for folder in site.getsitepackages() for path in Path(folder).glob("*")):
        if "runnerkit" not in path.name and path.suffix != ".pth" and not (theirs / path.name).exists():
            (theirs / path.name).symlink_to(path)


def shapes(text):
    """The lines, whatever their numbers are."""
    return [re.sub(r"\d[\d.e-]*", "N", line).split() for line in text.splitlines()]


@pytest.mark.slow
def test_the_quick_start_is_enough(tmp_path):
    """A model is trained, the page tells what is printed, a picture is drawn, TensorBoard has both curves."""
    newcomer = Newcomer(tmp_path)
    newcomer.run(f"{sys.executable} -m build --no-isolation --wheel --outdir dist {ROOT}")
    (make_environment, *install), [train], (table, draw, show) = map(str.splitlines, blocks(PAGE, "bash"))
    (tmp_path / "train.py").write_text(blocks(PAGE, "python")[0])

    newcomer.run(make_environment)
    lend_packages(tmp_path / "env")
    newcomer.run("\n".join(install))
    where = newcomer.run("python -c 'import runnerkit; print(runnerkit.__file__)'")
    printed = newcomer.run(train)

    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    assert shapes(printed) == shapes(blocks(PAGE, "text")[0])
    assert "accuracy03" in newcomer.run(table)
    newcomer.run(draw)
    assert (tmp_path / "logs" / "first" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert newcomer.run(train) == "", "it was over, and resume='auto' leaves it so"
    tags = tags_in_tensorboard(newcomer, f"{show} --port 0")
    assert set(tags) == {"first/tensorboard/train", "first/tensorboard/valid"}
    assert all({"loss", "accuracy"} <= set(each) for each in tags.values())


def tags_in_tensorboard(newcomer, command):
    """Ask its server for the names that its page shows, once it has read both runs; then press Ctrl-C."""
    server = newcomer.start(f"exec {command}")
    try:
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://localhost:\d+", line)))
        deadline = time.monotonic() + 60
        while len(tags := json.load(urllib.request.urlopen(f"{address}/data/plugin/scalars/tags"))) < 2:
            assert time.monotonic() < deadline, tags
            time.sleep(0.2)
        return tags
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.communicate(timeout=30)
