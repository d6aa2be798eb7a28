"""The README's table of step times, copied from the sections of RESULTS.md: ``python -m benchmarks.readme_table``."""

import re

from benchmarks.harness import ROOT
from benchmarks.results import read_section, write_section

README = ROOT / "README.md"
COLUMNS = {
    "steps-nothing": "nothing logged",
    "steps-loss": "mean loss",
    "steps-accuracy": "loss, accuracy",
    "steps-log": "loss, accuracy, step logs",
    "steps-bar": "loss, accuracy, bar",
}


def ratios(key: str) -> dict[str, str]:
    """Return the last cell of each row of a section's table, by the name of the row."""
    rows = re.findall(r"^\| ([^|]+) \|.*\| ([\d.]*) \|$", read_section(key), flags=re.MULTILINE)
    return dict(rows)


def table() -> str:
    """Format raw PyTorch, runnerkit, then the others by their mean ratio; those without all columns are left out."""
    columns = [ratios(key) for key in COLUMNS]
    names = [name for name in columns[0] if all(column.get(name) for column in columns)]
    others = sorted(names[2:], key=lambda name: sum(float(column[name]) for column in columns))
    rows = [f"| {name} | " + " | ".join(column[name] for column in columns) + " |" for name in [*names[:2], *others]]
    return "\n".join(["| | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---:|" * len(COLUMNS), *rows])


if __name__ == "__main__":
    write_section("step time", table(), README, command="make bench")
