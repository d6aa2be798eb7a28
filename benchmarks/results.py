"""The sections of RESULTS.md, each written anew by its own benchmark, the others left as they are."""

import datetime
import importlib
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.harness import ROOT, Figure, Outcome

RESULTS = ROOT / "benchmarks" / "RESULTS.md"


def table(outcome: Outcome, figures: Sequence[Figure]) -> str:
    """Write a row for each candidate: each figure's median, smallest to largest, and the ratio to the first row."""
    lines = [
        "| | " + " | ".join(f"{each.heading} | smallest to largest | ratio" for each in figures) + " |",
        "|---|" + "---|" * (3 * len(figures)),
    ]
    for name in outcome.reports:
        cells = [cell for figure in figures for cell in _cells(outcome, name, figure)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [f"\n{name}: not measured, {reason}." for name, reason in outcome.failures.items()]
    return "\n".join(lines)


def _cells(outcome: Outcome, name: str, figure: Figure) -> list[str]:
    values, ratio = outcome.values(name, figure), outcome.ratio(name, figure)
    if not values:
        return ["", "", ""]
    low, middle, high = (f"{each:,.{figure.digits}f}" for each in (min(values), statistics.median(values), max(values)))
    spread = "" if len(values) == 1 else "always" if low == high else f"{low} to {high}"
    return [middle, spread, "" if ratio is None else f"{ratio:.2f}"]


def conditions(num_rounds: int) -> str:
    """Tell when, on what, and with which versions."""
    return (
        f"{datetime.date.today()}; {_processor()}, {os.cpu_count()} cores, one thread a process, load "
        f"{os.getloadavg()[0]:.1f}; torch {version('torch')}, Python {platform.python_version()}; "
        f"{num_rounds} round{'s' * (num_rounds > 1)}."
    )


def _processor() -> str:
    try:
        names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def versions(python: str, packages: Sequence[str]) -> str:
    """Tell the versions of packages in the environment of another interpreter."""
    script = (
        "import importlib.metadata as m, sys\n"
        "for p in sys.argv[1:]:\n"
        "    try: print(p, m.version(p), end=', ')\n"
        "    except m.PackageNotFoundError: pass"
    )
    done = subprocess.run([python, "-c", script, *packages], capture_output=True, text=True, check=True)
    return done.stdout.rstrip(", ")


def write_section(key: str, text: str, path: Path = RESULTS, *, command: str = "python -m benchmarks") -> None:
    """Put `text`, which `command` makes, where the section `key` was, or at the end."""
    begin, end = _marks(key, command)
    section = f"{begin}\n{text.strip()}\n{end}"
    page = path.read_text(encoding="utf-8") if path.exists() else "# Measured\n"
    head, found, rest = page.partition(begin)
    if found:
        page = head + section + rest.partition(end)[2]
    else:
        page = f"{page.rstrip()}\n\n{section}\n"
    path.write_text(page, encoding="utf-8")


def read_section(key: str, path: Path = RESULTS, *, command: str = "python -m benchmarks") -> str:
    """Return what :func:`write_section` put there; empty if there is none."""
    begin, end = _marks(key, command)
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    return page.partition(begin)[2].partition(end)[0].strip()


def _marks(key: str, command: str) -> tuple[str, str]:
    return f"<!-- {key}: written by {command} -->", f"<!-- end of {key} -->"


def plot(key: str, outcome: Outcome, figure: Figure, folder: Path = RESULTS.parent / "plots") -> str:
    """Draw each candidate's rounds as points and the median as a bar; return Markdown, empty without matplotlib."""
    try:
        version("matplotlib")
    except PackageNotFoundError:
        return ""
    names = [name for name in outcome.reports if outcome.values(name, figure)]
    if len(names) < 2:
        return ""
    backend = importlib.import_module("matplotlib.figure")
    drawing = backend.Figure(figsize=(7, 0.6 + 0.32 * len(names)), layout="constrained")
    axes = drawing.subplots()
    for place, name in enumerate(reversed(names)):
        values = outcome.values(name, figure)
        axes.barh(place, statistics.median(values), color="tab:blue" if name.startswith("runnerkit") else "lightgrey")
        axes.plot(values, [place] * len(values), ".", color="black", markersize=3)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlabel(figure.heading)
    axes.set_xlim(left=0)
    folder.mkdir(exist_ok=True, parents=True)
    drawing.savefig(folder / f"{key}.png", dpi=110)
    return f"![{figure.heading}](plots/{key}.png)"
