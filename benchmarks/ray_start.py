"""Time from the call to the first step of all processes on a Ray cluster: runnerkit beside Ray Train.

python -m benchmarks.ray_start

A cluster of two nodes runs on this machine. `on_ray/ours.py` trains on it, and also in local processes, without its
`launcher=`; `on_ray/ray_train.py` does the same with TorchTrainer. In each round all contenders run, one after the
other, each in a new Python process, which is not connected to the cluster before. Nothing else is measured of them.
Then one of two processes kills itself in its second epoch, and once more after the restart, which is the last one.
The local processes do not restart. `--write` writes the tables to RESULTS.md and docs/launchers.md.
"""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import ONE_THREAD, ROOT
from benchmarks.results import conditions, write_section

SCRIPTS = ROOT / "benchmarks" / "on_ray"
CONTENDERS = {
    "runnerkit, local processes": "ours.py",
    "runnerkit, RayLauncher": "ours.py",
    "Ray Train, TorchTrainer": "ray_train.py",
}
LOCAL, *ON_RAY = CONTENDERS
NUM_PROCESSES = (1, 2, 4)
PAGE = ROOT / "docs" / "launchers.md"
EXPLANATION = (
    "Seconds are medians, from the call of `train` or `fit`, which also connects to the cluster; "
    "[RESULTS.md](../benchmarks/RESULTS.md) has the ranges, and the times from the start of the scripts."
)
DEATHS = "6 2"  # of 4 steps in an epoch: in the second epoch, and in the second epoch again
FOLDER = "BENCHMARK_FOLDER"  # variable with the folder for the times
TIMEOUT_S, PAUSE_S = 180, 1.0


@contextmanager
def running_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run two nodes; yield the environment of the scripts."""
    paths = f"{ROOT}{os.pathsep}{SCRIPTS}"
    os.environ.update(ONE_THREAD, PYTHONPATH=paths, RAY_USAGE_STATS_ENABLED="0")
    os.environ[FOLDER] = str(folder)
    from ray.cluster_utils import Cluster  # its nodes inherit the environment

    options = {"num_cpus": max(NUM_PROCESSES) // 2, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **options})
    try:
        cluster.add_node(**options)
        cluster.wait_for_nodes()
        yield {**os.environ, "RAY_ADDRESS": cluster.address}
    finally:
        cluster.shutdown()


def measured(
    contender: str, num_processes: int, environment: dict[str, str], *, deaths: str = "", max_restarts: int = 0
) -> dict[str, Any]:
    """Run a contender; return the times of its start, its call, its steps and its deaths, and its error."""
    times = Path(environment[FOLDER])
    for path in times.iterdir():
        path.unlink()
    if deaths:
        (times / "deaths").write_text(deaths)
    command = [sys.executable, "-m", "benchmarks.ray_start", "--run", contender, str(num_processes), str(max_restarts)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    report = times / "report"
    if not report.exists():
        raise RuntimeError(f"{contender} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = {kind: sorted(float(path.read_text()) for path in times.glob(f"{kind}.*")) for kind in ("step", "death")}
    time.sleep(PAUSE_S)  # until the cluster has ended its processes
    return {**json.loads(report.read_text()), **found}


def run_script(contender: str, num_processes: int, max_restarts: int) -> None:
    """Run a contender's script in this process; write when it started and called, and what it raised."""
    report: dict[str, Any] = {"started": time.time()}

    def recording(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def recorded(*arguments: Any, **options: Any) -> Any:
            report["called"] = time.time()
            return call(*arguments, **options)

        return recorded

    script = SCRIPTS / CONTENDERS[contender]
    if script.name == "ours.py":
        from runnerkit import dl

        dl.SupervisedRunner.train = recording(dl.SupervisedRunner.train)  # type: ignore[method-assign]
        if contender == LOCAL:
            dl.RayLauncher = lambda **_: None  # type: ignore[assignment,misc]
    else:
        from ray.train.torch import TorchTrainer

        TorchTrainer.fit = recording(TorchTrainer.fit)
    sys.argv = [str(script), str(num_processes), str(max_restarts)]
    sys.path.insert(0, str(SCRIPTS))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        report |= {"raised": time.time(), "error": f"{type(error).__name__}: {error}"}
    Path(os.environ[FOLDER], "report").write_text(json.dumps(report))


def table_of_starts(reports: dict[tuple[str, int], list[dict[str, Any]]]) -> str:
    """Format the seconds to the first step of the last process."""
    lines = [
        "| | processes | from the call, s | range | from the start of the script, s | range |",
        "|---|---:|---:|---|---:|---|",
    ]
    for (contender, num_processes), rounds in reports.items():
        cells = []
        for start in ("called", "started"):
            times = [max(each["step"]) - each[start] for each in rounds]
            cells += [f"{median(times):.1f}", f"{min(times):.1f} to {max(times):.1f}"]
        lines.append(f"| {contender} | {num_processes} | {' | '.join(cells)} |")
    return "\n".join(lines)


def comparison(starts: dict[tuple[str, int], list[dict[str, Any]]], deaths: dict[str, dict[str, Any]]) -> str:
    """Format the medians, the times after a SIGKILL, and the lines of the scripts, with a column per contender."""
    rows = {"lines of the script": {name: str(num_lines(name)) for name in CONTENDERS}}
    for number in NUM_PROCESSES:
        times = {name: median(max(each["step"]) - each["called"] for each in starts[name, number]) for name in deaths}
        row = f"first step of {f'all {number} processes' if number > 1 else '1 process'}, s"
        rows[row] = {name: f"{each:.1f}" for name, each in times.items()}
    rows["steps again after SIGKILL of one of 2, s"] = {
        name: f"{max(each['step']) - each['death'][0]:.1f}" if len(each["death"]) > 1 else ""
        for name, each in deaths.items()
    }
    rows["the caller has the error after it, s"] = {
        name: f"{each['raised'] - each['death'][-1]:.1f}" for name, each in deaths.items()
    }
    rows["which begins with"] = {name: f"`{shown(each['error']).splitlines()[0]}`" for name, each in deaths.items()}
    lines = [f"| | {' | '.join(CONTENDERS)} |", "|---|" + "---:|" * len(CONTENDERS)]
    lines += [f"| {row} | {' | '.join(cells[name] for name in CONTENDERS)} |" for row, cells in rows.items()]
    return "\n".join(lines)


def shown(error: str) -> str:
    """Return the lines of an error that are not indented, shortened, without addresses."""
    lines = [line[:110] for line in error.splitlines() if line[:1].strip(" )")]
    return re.sub(r"\d+(\.\d+){3}", "10.0.0.1", "\n".join(lines[:12]))


def num_lines(contender: str) -> int:
    """Count the lines of a script that are not blank; that without its launcher is as long."""
    return sum(bool(line.strip()) for line in (SCRIPTS / CONTENDERS[contender]).read_text().splitlines())


def main() -> None:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the tables to RESULTS.md and launchers.md")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        contender, *numbers = options.run
        run_script(contender, *map(int, numbers))
        return
    place = f"{conditions(options.rounds)} Ray {version('ray')}, a cluster of two nodes on this machine."
    keys = [(contender, num_processes) for num_processes in NUM_PROCESSES for contender in CONTENDERS]
    starts: dict[tuple[str, int], list[dict[str, Any]]] = {key: [] for key in keys}
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder)) as environment:
        for number in range(options.rounds):
            for contender, num_processes in keys[:: -1 if number % 2 else 1]:
                report = measured(contender, num_processes, environment)
                assert len(report["step"]) == num_processes and "error" not in report, report
                starts[contender, num_processes].append(report)
                print(contender, num_processes, f"{max(report['step']) - report['called']:.1f} s", flush=True)
        deaths = {LOCAL: measured(LOCAL, 2, environment, deaths=DEATHS.split()[0])}
        for contender in ON_RAY:
            deaths[contender] = measured(contender, 2, environment, deaths=DEATHS, max_restarts=1)
    errors = [f"{name} raises:\n\n```text\n{shown(each['error'])}\n```" for name, each in deaths.items()]
    compared = comparison(starts, deaths)
    text = "\n\n".join([place, "To the first step of the last process:", table_of_starts(starts), compared, *errors])
    print(text)
    if options.write:
        command = "python -m benchmarks.ray_start --write"
        title = "Start of a job on a Ray cluster, and the end of a process"
        write_section("ray start", text, command=command, title=title)
        write_section("ray start", f"{compared}\n\n{EXPLANATION} {place}", PAGE, command=command)


if __name__ == "__main__":
    main()
