"""The README's speed table matches the measured results."""

import re
from pathlib import Path

from benchmarks.results import RESULTS

README = Path(__file__).parents[2] / "README.md"
VARIANTS = ["nothing", "loss", "accuracy", "log", "bar"]


def rows(text):
    """Return the cells of a table's rows by their first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {name: cells for name, *cells in lines}


def section(path, begin, end):
    return path.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]


def test_the_ratios_are_those_of_the_results():
    """Every column matches; raw PyTorch comes first and runnerkit second."""
    table = rows(section(README, "### Step time", "\n## "))
    measured = [rows(section(RESULTS, f"<!-- steps-{key}: written", f"<!-- end of steps-{key}")) for key in VARIANTS]
    names = [name for name, cells in table.items() if re.fullmatch(r"[\d.]+", cells[0])]

    assert names[:2] == ["raw PyTorch", "runnerkit"]
    assert len(names) == 10
    for name in names:
        assert table[name] == [variant[name][-1] for variant in measured]
