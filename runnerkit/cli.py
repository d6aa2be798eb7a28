"""The command `runnerkit`: what was detected, the metrics of a run, their curves, the state of its files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from runnerkit.doctor import examine
from runnerkit.engines.process_environment import describe_launcher
from runnerkit.environment import describe_environment
from runnerkit.history import read_metrics
from runnerkit.plot import plot_metrics
from runnerkit.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 1 if it found something broken, 2 for a wrong use."""
    parser = argparse.ArgumentParser(prog="runnerkit", description=__doc__)
    parser.add_argument("--version", action="version", version=f"runnerkit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("env", help="print versions, hardware and launcher, ready for a bug report")
    metrics = commands.add_parser("metrics", help="print the metrics of a run, one row an epoch and loader")
    metrics.add_argument("logdir")
    plot = commands.add_parser("plot", help="draw the curves of a run, or of a folder of runs")
    plot.add_argument("logdir")
    plot.add_argument("-o", "--output", help="path of the PNG; by default LOGDIR/metrics.png")
    doctor = commands.add_parser("doctor", help="verify the checkpoints and logs of a run")
    doctor.add_argument("logdir")
    options = parser.parse_args(arguments)
    try:
        text, code = _COMMANDS[options.command](options)
    except (OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"runnerkit {options.command}: {error}\n")
        return 2
    sys.stdout.write(text + "\n")
    return code


def _env(_: argparse.Namespace) -> tuple[str, int]:
    return json.dumps({**describe_environment(), "launcher": describe_launcher()}, indent=2), 0


def _metrics(options: argparse.Namespace) -> tuple[str, int]:
    frame = read_metrics(options.logdir)
    table = frame.pivot_table(
        index=["run", "stage", "epoch", "step", "loader"], columns="metric", values="value", sort=False
    )
    return str(table.to_string(float_format="%.4g")), 0


def _plot(options: argparse.Namespace) -> tuple[str, int]:
    return str(plot_metrics(options.logdir, path=options.output)), 0


def _doctor(options: argparse.Namespace) -> tuple[str, int]:
    report = examine(options.logdir)
    return str(report), 1 if report.num_broken else 0


_COMMANDS = {"env": _env, "metrics": _metrics, "plot": _plot, "doctor": _doctor}
