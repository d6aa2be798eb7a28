"""docs/migration: both programs of a page reach the same numbers, and the names in its table exist."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runnerkit import dl
from tests.peers import PEERS, needs_peers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "migration"
# Each framework's name on PyPI; the hand-written loop needs no package.
DISTRIBUTIONS = {name: name for name in ("lightning", "accelerate", "catalyst")} | {"ignite": "pytorch-ignite"}
NAMES = ["by_hand", *DISTRIBUTIONS]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
NUM_VALID = 517


def text_of(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def programs(name):
    """Extract the page's two programs, "theirs" and "ours", each after the common beginning."""
    theirs, ours = (
        re.findall(rf"^```python{title}\n(.*?)^```", text_of(name), flags=re.MULTILINE | re.DOTALL)
        for title in (' title="theirs.py"', "")
    )
    (common, ours), (theirs,) = ours, theirs
    return {"theirs": common + theirs, "ours": common + ours}


def start(name, side, folder, runs, launcher=()):
    """Run one of a page's programs in its own folder and load the results of each run."""
    python = sys.executable
    if side == "theirs" and name in DISTRIBUTIONS:
        needs_peers()
        python = PEERS / "bin" / "python"
    folder = folder / side
    folder.mkdir()
    (folder / "program.py").write_text(programs(name)[side], encoding="utf-8")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if side == "ours":
        environment["PYTHONPATH"] = str(ROOT)
    command = [python, *launcher, ROOT / "tests" / "migration" / "run_program.py", *runs]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return {run: torch.load(folder / f"{run}.pt", weights_only=True) for run in runs}


def assert_same(theirs, ours, *, tied=0):
    """Compare losses and best weights to 1e-6, as float32 sums depend on their order, and accuracy up to `tied`
    samples."""
    assert theirs["rows"].shape == ours["rows"].shape == (5, 3)
    torch.testing.assert_close(theirs["rows"][:, :2], ours["rows"][:, :2], rtol=1e-6, atol=0)
    torch.testing.assert_close(theirs["rows"][:, 2], ours["rows"][:, 2], rtol=0, atol=1e-6 + tied / NUM_VALID)
    torch.testing.assert_close(theirs["weights"], dict(ours["weights"]), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_both_programs_reach_the_same_numbers(name, tmp_path):
    """They agree over a full run, in bf16, and when resumed after two epochs; the best weights are not the last
    ones."""
    runs = ("whole", "amp", "resumed")
    theirs, ours = (start(name, side, tmp_path, runs) for side in ("theirs", "ours"))

    for run in runs:
        # bf16 produces equal logits now and then, and Catalyst's topk orders these differently.
        assert_same(theirs[run], ours[run], tied=name == "catalyst" and run == "amp")
    torch.testing.assert_close(ours["resumed"], ours["whole"], rtol=0, atol=0)
    assert ours["whole"]["rows"][:, 1].argmin() == 2
    assert not torch.equal(ours["amp"]["rows"], ours["whole"]["rows"])
    if name == "catalyst":
        saved = tmp_path / "theirs" / "whole"
        best, last, third = (
            torch.load(saved / f"runner.{each}.pth", weights_only=True)["model_state_dict"]["0.weight"]
            for each in ("best", "last", "0003")
        )
        assert torch.equal(best, last) and not torch.equal(best, third)  # as the page says


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["by_hand", "accelerate"])
def test_both_programs_reach_the_same_numbers_in_two_processes(name, tmp_path):
    """Under torchrun, each of the 517 samples, an odd number, counts once."""
    theirs, ours = (start(name, side, tmp_path, ("processes",), TORCHRUN) for side in ("theirs", "ours"))

    assert_same(theirs["processes"], ours["processes"])
    hits = ours["processes"]["rows"][:, 2] * NUM_VALID
    torch.testing.assert_close(hits, hits.round(), rtol=0, atol=1e-3)  # a share of 517 samples, not of 518


def test_all_pages_begin_with_the_same_data_and_model():
    """Numbers can be compared across pages, and the overview lists each page."""
    begins = {text_of(name).split("## Shared setup")[1].split("## ")[0] for name in NAMES}

    assert len(begins) == 1
    assert {path.stem for path in FOLDER.glob("*.md")} == {"index", *NAMES}
    assert all(f"({name}.md)" in text_of("index") for name in NAMES)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_page_is_for_the_version_that_its_test_runs(name):
    """The page names the version that benchmarks/peers/requirements.txt pins."""
    pinned = (ROOT / "benchmarks" / "peers" / "requirements.txt").read_text()
    (version,) = re.findall(rf"^{DISTRIBUTIONS[name]}==(\S+)$", pinned, flags=re.MULTILINE)

    assert f"For {name.title()} {version}" in text_of(name)


def names_in(name, column):
    """Return the names in a column of the page's table: words that contain a capital letter or an underscore."""
    table = text_of(name).split("## Equivalents")[1].split("## ")[0]
    cells = [line.strip("|").split(" | ")[column] for line in table.splitlines() if line.startswith("| ")][1:]
    code = " ".join(re.findall(r"`([^`]+)`", " ".join(cells)))
    return set(re.findall(r"\b(?:[A-Z]\w+|\w+_\w+)", re.sub(r'"[^"]*"', "", code)))


@functools.cache
def words_of(*folders):
    """Return all words in the Python sources below the folders."""
    files = (path for folder in folders for path in folder.rglob("*.py"))
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", NAMES)
def test_a_pages_table_names_what_runnerkit_has(name):
    """Each class, argument and attribute in the right column occurs in the sources."""
    ours = words_of(*(ROOT / folder for folder in ("runnerkit", "engines", "callbacks", "loggers")))

    assert names_in(name, 1) - ours == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_pages_table_names_what_they_have(name):
    """Each name in the left column occurs in the framework's sources; Catalyst's page also has names of 21.12 and of
    Accelerate, to which 22.4 passes arguments."""
    needs_peers()
    (packages,) = PEERS.glob("lib/python*/site-packages")
    more = (packages / "accelerate", PEERS / "catalyst-21.12") if name == "catalyst" else ()
    theirs = words_of(packages / name, *more)

    assert names_in(name, 0) - theirs == set()


def test_what_catalysts_page_calls_missing_is_missing():
    """Names that runnerkit has gained since must be removed from the list."""
    listed = text_of("catalyst").split("- Names: ")[1].split("\n- ")[0]

    assert [name for name in re.findall(r"`(\w+)`", listed) if hasattr(dl, name)] == []
