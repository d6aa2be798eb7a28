"""One run of all parts: it probes the device, schedules the checks and keeps the report."""

import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.on_gpu import child, machine
from benchmarks.on_gpu.check import Check, Outcome, Setting
from benchmarks.on_gpu.report import Report, summary
from benchmarks.on_gpu.schedule import run_checks

# Imported once, before processes are forked. None of them starts CUDA, which would break it in the forks.
PRELOADED = ("torch._dynamo", "runnerkit.dl")
CORES_PER_JOB, MOST_JOBS = 2, 5


def run(
    device: Literal["cuda", "cpu"],
    parts: dict[str, str],
    *,
    path: Path,
    limit_s: float,
    num_jobs: int | None,
    began: float | None = None,
) -> int:
    """Run the parts, print a line for each check, and return the exit code.

    Args:
        device: "cuda" or "cpu".
        parts: titles by name; the first is `machine`.
        path: of the report, without a suffix.
        limit_s: total seconds since `began`.
        num_jobs: None derives it from the number of cores.
    """
    began = time.monotonic() if began is None else began
    setting = Setting(device)
    report = Report(path, machine=machine.describe_host(), parts=parts)
    report.write()
    for name in PRELOADED:
        importlib.import_module(name)
    if num_jobs is None:
        num_jobs = max(1, min(MOST_JOBS, (os.cpu_count() or 1) // (CORES_PER_JOB if device == "cuda" else 1)))

    start_method = _probe(setting, report, limit_s=limit_s, began=began)
    loaded = [_loaded(part) for part in parts if part != "machine"]
    for part, checks in loaded:
        if not checks:
            _tell(report, _not_loaded(part))
    for outcome in run_checks(
        loaded, setting, limit_s=limit_s, num_jobs=num_jobs, start_method=start_method, began=began
    ):
        _tell(report, outcome)
    report.machine["total"] = f"{time.monotonic() - began:.0f} s"
    report.write()
    print(f"{summary(report.outcomes)}; see {path}.md", flush=True)
    return 1 if report.has_failures else 0


def _probe(setting: Setting, report: Report, *, limit_s: float, began: float) -> str:
    """Run part `machine`; return "fork", or "spawn" if the device does not compute in a forked process."""
    for start_method in ("fork", "spawn"):
        [outcome] = run_checks(
            [("machine", machine.CHECKS)], setting, limit_s=limit_s, num_jobs=1, start_method=start_method, began=began
        )
        if outcome.status == "passed":
            break
    report.machine |= {**outcome.figures, "processes": start_method}
    outcome.figures = {}
    _tell(report, outcome)
    return start_method


def _loaded(part: str) -> tuple[str, Sequence[Check]]:
    """Return the checks of a part, or an empty sequence if its import fails, which must not end the others."""
    try:
        return part, child.checks_of(part)
    except Exception:
        traceback.print_exc()
        return part, ()


def _not_loaded(part: str) -> Outcome:
    return Outcome(part, f"import of {part}", "failed", f"cannot import {child.PACKAGE}.{part}: see the output")


def _tell(report: Report, outcome: Outcome) -> None:
    report.add(outcome)
    reason = f": {outcome.reason}" if outcome.reason else ""
    print(f"{outcome.seconds:6.1f} s  {outcome.part}: {outcome.name}: {outcome.status}{reason}", flush=True)
    for line in outcome.last_lines:
        print(f"          {line}", file=sys.stderr, flush=True)
