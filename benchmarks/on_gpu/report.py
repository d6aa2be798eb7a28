"""The report: one JSON file, and one Markdown page made from the same data."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.check import Figures, Outcome

STATUSES = ("passed", "failed", "skipped", "not run")


class Report:
    """Outcomes, written to `path`.json and `path`.md after each of them, so that a lost machine leaves what was done.

    Args:
        path: of both files, without a suffix.
        machine: date, hardware and versions; may be completed later.
        parts: titles by part, in the order of the page.
    """

    def __init__(self, path: Path, *, machine: Figures, parts: dict[str, str]) -> None:
        self.path, self.machine, self.parts = path, machine, parts
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """Add an outcome and write both files."""
        self.outcomes.append(outcome)
        self.write()

    @property
    def has_failures(self) -> bool:
        return any(each.status == "failed" for each in self.outcomes)

    @property
    def counts(self) -> dict[str, int]:
        """Number of checks by status."""
        return {status: sum(each.status == status for each in self.outcomes) for status in STATUSES}

    def write(self) -> None:
        """Replace both files."""
        data = {
            "machine": self.machine,
            "parts": self.parts,
            "counts": self.counts,
            "checks": [asdict(each) for each in self.outcomes],
        }
        _replace(self.path.with_suffix(".json"), json.dumps(data, indent=1, default=str) + "\n")
        _replace(self.path.with_suffix(".md"), page(data))


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def page(data: dict[str, Any]) -> str:
    """Format the data of a report as Markdown."""
    counts = ", ".join(f"{count} {status}" for status, count in data["counts"].items() if count)
    lines = ["# Checks on a GPU", "", f"{counts or 'No check has ended'}.", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in data["machine"].items()]
    for part, title in data["parts"].items():
        checks = [each for each in data["checks"] if each["part"] == part]
        if checks:
            lines += ["", f"## {title}", "", "| check | status | figures | s |", "|---|---|---|---:|"]
            lines += [_row(each) for each in checks]
    failed = [each for each in data["checks"] if each["status"] == "failed"]
    for each in failed:
        lines += ["", f"### Failed: {each['name']}", "", each["reason"]]
        if each["last_lines"]:
            lines += ["", "```text", *each["last_lines"], "```"]
    return "\n".join(lines) + "\n"


def _row(check: dict[str, Any]) -> str:
    status = check["status"] if not check["reason"] else f"{check['status']}: {check['reason']}"
    figures = "; ".join(f"{key} {text(value)}" for key, value in check["figures"].items())
    return f"| {_cell(check['name'])} | {_cell(status)} | {_cell(figures)} | {check['seconds']:.1f} |"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def text(value: Any) -> str:
    """Format a figure for reading.

    >>> text(0.0), text(1.0346), text(1234.56), text(3e-08), text(True)
    ('0', '1.035', '1,235', '3.0e-08', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(text(each) for each in value)
    if not isinstance(value, float):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return one line for the terminal."""
    counts = {status: sum(each.status == status for each in outcomes) for status in STATUSES}
    return ", ".join(f"{count} {status}" for status, count in counts.items())
