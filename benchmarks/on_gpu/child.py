"""The process of one check: it runs the check and writes its outcome as JSON."""

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from benchmarks.on_gpu.check import Check, Failed, Outcome, Setting, Skipped

PACKAGE = "benchmarks.on_gpu"
WARN_S = 3  # before a check is killed, the tracebacks of its threads are written to its output


def checks_of(part: str) -> tuple[Check, ...]:
    """Import a part and return its checks."""
    checks: tuple[Check, ...] = importlib.import_module(part if "." in part else f"{PACKAGE}.{part}").CHECKS
    return checks


def run(part: str, name: str, setting: Setting, result: Path, output: Path, limit_s: float) -> None:
    """Run a check and end the process; called in a process of its own.

    Args:
        result: file of the outcome; a process that dies leaves none.
        output: file of everything that the check and its child processes print.
    """
    os.setsid()  # so that all child processes are killed with the check
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(limit_s - WARN_S, limit_s / 2))
    outcome = outcome_of(part, name, setting)
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(outcome), default=str))
    partial.replace(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without cleanup, in which a broken CUDA context could crash or hang


def outcome_of(part: str, name: str, setting: Setting) -> Outcome:
    """Run a check in this process."""
    began = time.perf_counter()
    outcome = Outcome(part, name, "passed")
    try:
        [check] = [each for each in checks_of(part) if each.name == name]
        outcome.figures = check.run(setting)
    except Skipped as skipped:
        outcome.status, outcome.reason = "skipped", str(skipped)
    except Failed as failed:
        outcome.status, outcome.reason, outcome.figures = "failed", str(failed), failed.figures
    except BaseException as error:  # SystemExit from a library is a failure too
        traceback.print_exc()
        message = str(error).strip().splitlines() or [""]
        outcome.status, outcome.reason = "failed", f"{type(error).__name__}: {message[0]}"
    outcome.seconds = time.perf_counter() - began
    return outcome
