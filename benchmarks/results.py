"""Sections of RESULTS.md: each benchmark rewrites its own and leaves the others unchanged."""

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
    """Format a row per candidate: each figure's median, its range, and the ratio to the first row."""
    lines = [
        "| | " + " | ".join(f"{each.heading} | range | ratio" for each in figures) + " |",
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
    spread = "" if len(values) == 1 else "constant" if low == high else f"{low} to {high}"
    return [middle, spread, "" if ratio is None else f"{ratio:.2f}"]


def conditions(num_rounds: int) -> str:
    """Describe the date, machine and versions of a measurement."""
    return (
        f"{datetime.date.today()}; {_processor()}, {os.cpu_count()} cores, one thread per process, load "
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
    """Return the versions of packages in another interpreter's environment."""
    script = (
        "import importlib.metadata as m, sys\n"
        "for p in sys.argv[1:]:\n"
        "    try: print(p, m.version(p), end=', ')\n"
        "    except m.PackageNotFoundError: pass"
    )
    done = subprocess.run([python, "-c", script, *packages], capture_output=True, text=True, check=True)
    return done.stdout.rstrip(", ")


def write_section(
    key: str, text: str, path: Path = RESULTS, *, command: str = "python -m benchmarks", title: str | None = None
) -> None:
    """Replace the section `key` with `text`, which `command` generates, below `title`, or append it."""
    begin, end = _marks(key, command)
    text = text if title is None else f"## {title}\n\n{text}"
    section = f"{begin}\n{text.strip()}\n{end}"
    page = path.read_text(encoding="utf-8") if path.exists() else "# Benchmark results\n"
    head, found, rest = page.partition(begin)
    if found:
        page = head + section + rest.partition(end)[2]
    else:
        page = f"{page.rstrip()}\n\n{section}\n"
    path.write_text(page, encoding="utf-8")


def read_section(key: str, path: Path = RESULTS, *, command: str = "python -m benchmarks") -> str:
    """Return the text that :func:`write_section` wrote, or an empty string."""
    begin, end = _marks(key, command)
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    return page.partition(begin)[2].partition(end)[0].strip()


def _marks(key: str, command: str) -> tuple[str, str]:
    return f"<!-- {key}: written by {command} -->", f"<!-- end of {key} -->"


def plot(key: str, outcome: Outcome, figure: Figure, folder: Path = RESULTS.parent / "plots") -> str:
    """Plot each candidate's rounds as points and the median as a bar; return Markdown, empty without matplotlib."""
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
