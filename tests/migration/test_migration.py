"""docs/migration: both programs of a page reach the same numbers, and the page names what there is."""

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
# Under which name pip knows them; the loop by hand needs nobody.
DISTRIBUTIONS = {
    "lightning": "lightning",
    "accelerate": "accelerate",
    "ignite": "pytorch-ignite",
    "catalyst": "catalyst",
}
NAMES = ["by_hand", *DISTRIBUTIONS]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
NUM_VALID = 517


def text_of(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def programs(name):
    """The page's programs, each with what both begin with: theirs, ours."""
    theirs, ours = (
        re.findall(rf"^```python{title}\n(.*?)^```", text_of(name), flags=re.MULTILINE | re.DOTALL)
        for title in (' title="theirs.py"', "")
    )
    (common, ours), (theirs,) = ours, theirs
    return {"theirs": common + theirs, "ours": common + ours}


def start(name, side, folder, runs, launcher=()):
    """Run one program of a page in a folder of its own; return what each run came to."""
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
    """Losses and best weights to 1e-6, as float32 sums differ by their order; accuracy but for `tied` samples."""
    assert theirs["rows"].shape == ours["rows"].shape == (5, 3)
    torch.testing.assert_close(theirs["rows"][:, :2], ours["rows"][:, :2], rtol=1e-6, atol=0)
    torch.testing.assert_close(theirs["rows"][:, 2], ours["rows"][:, 2], rtol=0, atol=1e-6 + tied / NUM_VALID)
    torch.testing.assert_close(theirs["weights"], dict(ours["weights"]), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_both_programs_reach_the_same_numbers(name, tmp_path):
    """Whole, in bf16, and stopped after two epochs and resumed; the best weights are not the last ones."""
    runs = ("whole", "amp", "resumed")
    theirs, ours = (start(name, side, tmp_path, runs) for side in ("theirs", "ours"))

    for run in runs:
        # bf16 makes logits the same now and then, and Catalyst's topk has its own choice among those.
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
    """Under torchrun; 517 samples are no multiple of two, and each counts once."""
    theirs, ours = (start(name, side, tmp_path, ("processes",), TORCHRUN) for side in ("theirs", "ours"))

    assert_same(theirs["processes"], ours["processes"])
    hits = ours["processes"]["rows"][:, 2] * NUM_VALID
    torch.testing.assert_close(hits, hits.round(), rtol=0, atol=1e-3)  # of so many samples, not of 518


def test_all_pages_begin_with_the_same_data_and_model():
    """So that what holds of one page's numbers holds of all; the overview lists each page."""
    begins = {text_of(name).split("## The same for both")[1].split("## ")[0] for name in NAMES}

    assert len(begins) == 1
    assert {path.stem for path in FOLDER.glob("*.md")} == {"index", *NAMES}
    assert all(f"({name}.md)" in text_of("index") for name in NAMES)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_page_is_for_the_version_that_its_test_runs(name):
    """Which benchmarks/peers/requirements.txt pins."""
    pinned = (ROOT / "benchmarks" / "peers" / "requirements.txt").read_text()
    (version,) = re.findall(rf"^{DISTRIBUTIONS[name]}==(\S+)$", pinned, flags=re.MULTILINE)

    assert f"For {name.title()} {version}" in text_of(name)


def names_in(name, column):
    """Names in a column of the page's table: those with a capital or an underscore, which are no plain words."""
    table = text_of(name).split("## What becomes of what")[1].split("## ")[0]
    cells = [line.strip("|").split(" | ")[column] for line in table.splitlines() if line.startswith("| ")][1:]
    code = " ".join(re.findall(r"`([^`]+)`", " ".join(cells)))
    return set(re.findall(r"\b(?:[A-Z]\w+|\w+_\w+)", re.sub(r'"[^"]*"', "", code)))


def words_of(*folders):
    """All words in the sources below."""
    files = (path for folder in folders for path in folder.rglob("*.py"))
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", NAMES)
def test_a_pages_table_names_what_runnerkit_has(name):
    """Each class, argument and attribute on the right stands in the sources."""
    ours = words_of(*(ROOT / folder for folder in ("runnerkit", "engines", "callbacks", "loggers")))

    assert names_in(name, 1) - ours == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_pages_table_names_what_they_have(name):
    """Likewise on the left. Catalyst's engines hand their arguments to Accelerate."""
    needs_peers()
    (packages,) = PEERS.glob("lib/python*/site-packages")
    theirs = words_of(packages / name, packages / "accelerate") if name == "catalyst" else words_of(packages / name)

    assert names_in(name, 0) - theirs == set()


def test_what_catalysts_page_calls_missing_is_missing():
    """What has come since is to be taken off the list."""
    listed = text_of("catalyst").split("- Names: ")[1].split("\n- ")[0]

    assert set(re.findall(r"`(\w+)`", listed)) & set(dl.__all__) == set()
