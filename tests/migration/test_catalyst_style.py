"""Programs in Catalyst's style run with Catalyst and, after a change of import lines, with runnerkit: the same numbers.

docs/migration/catalyst.md lists what differs: counters and files.
"""

import difflib
import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.migration.test_migration import text_of
from tests.peers import PEERS, needs_peers

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "catalyst_style"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))


def ported(text):
    """Change the import lines."""
    return re.sub(r"^(from|import) catalyst\b", r"\1 runnerkit", text, flags=re.MULTILINE)


def run_both(root):
    """Run all programs with both frameworks; return their numbers, and the files they wrote, by side."""
    needs_peers()
    found = {}
    for side, python in (("theirs", PEERS / "bin" / "python"), ("ours", sys.executable)):
        folder = root / side
        folder.mkdir()
        for path in FOLDER.glob("*.py"):
            text = path.read_text(encoding="utf-8")
            (folder / path.name).write_text(text if side == "theirs" else ported(text), encoding="utf-8")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if side == "ours":
            environment["PYTHONPATH"] = str(ROOT)
        command = [python, ROOT / "tests" / "migration" / "run_catalyst_style.py", "numbers.json"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        logs = folder / "logs"
        files = [path.relative_to(logs).as_posix() for path in logs.rglob("*") if path.is_file()]
        found[side] = json.loads((folder / "numbers.json").read_text()), sorted(files)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_import_lines_change(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")

    lines = difflib.ndiff(text.splitlines(), ported(text).splitlines())

    changed = [line[2:] for line in lines if line[0] in "+-"]
    assert changed and all(line.startswith(("from ", "import ")) for line in changed)
    assert "catalyst" not in ported(text)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_frameworks_return_the_same_numbers(tmp_path):
    """To 1e-5, which Catalyst adds to some denominators; counters and files differ as the page says."""
    results = run_both(tmp_path)
    (theirs, _), (ours, _) = results["theirs"], results["ours"]

    for name in set(PROGRAMS) - {"counters"}:
        assert not isinstance(theirs[name], str), theirs[name]
        assert ours[name] == pytest.approx(theirs[name], rel=0, abs=1e-5), name
    assert_counters_differ_as_the_page_says(theirs["counters"], ours["counters"])
    for column, side in enumerate(("theirs", "ours")):
        assert_files_are_those_of_the_page(results[side][1], column)


def table_of(title):
    """Return the rows of the table below a title of the page, without header."""
    section = text_of("catalyst").split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def assert_counters_differ_as_the_page_says(theirs, ours):
    """At each event of a callback; the page has the values at the end of the second epoch."""
    names = re.findall(r'^    "(\w+)",$', (FOLDER / "counters.py").read_text(), flags=re.MULTILINE)

    assert list(theirs) == list(ours)  # the events and their order
    differing = set()
    for event, values in theirs.items():
        pairs = enumerate(zip(values, ours[event], strict=True))
        differing |= {names[place] if len(values) == len(names) else event for place, (a, b) in pairs if a != b}
    *_, last = theirs
    rows = {name: [str(side[last][names.index(name)]) for side in (theirs, ours)] for name in names}
    listed = {name.strip("`"): values for name, *values in table_of("Counters")}
    assert listed == {name: rows[name] for name in listed} and last.endswith("on_epoch_end")
    assert differing == {name for name, (a, b) in listed.items() if a != b}


def assert_files_are_those_of_the_page(files, column):
    """Each file of the run with loggers and checkpoints is in the table, and each path of the table is written."""
    rows = [[cell.replace("`", "").split(", ") for cell in row[1:]] for row in table_of("Files")]
    prefix = "multiclass/"
    files = [each.removeprefix(prefix) for each in files if each.startswith(prefix)]
    patterns = [pattern for row in rows for pattern in row[column] if pattern != "-"]
    assert [each for each in files if not any(fnmatch.fnmatch(each, pattern) for pattern in patterns)] == []
    assert [each for each in patterns if not fnmatch.filter(files, each)] == []
