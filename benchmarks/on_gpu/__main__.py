"""Check runnerkit on a GPU: equal numbers, speed, Apex and memory beside plain PyTorch; write one report.

make gpu, or python -m benchmarks.on_gpu --device cuda --report gpu_report

Runs from the checkout with the packages that are installed. `--device cpu` is a dry run at tiny sizes. Exits with 1 if
a check failed.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {
    "machine": "The machine",
    "parity": "Equal numbers: engines",
    "overflow": "Equal numbers: overflow in fp16",
    "resume": "Equal numbers: resume",
    "host_sync": "No host synchronization",
    "step_time": "Time of a step, in turns with raw PyTorch",
    "data_time": "Time of an epoch, data included",
    "peers": "Time of a step of other frameworks",
    "apex_levels": "Apex",
    "memory": "Memory",
    "compiled_step_time": "Time of a step, compiled",  # last, because it takes longest
}
LIMIT_S = 540.0


def main() -> None:
    """Run the selected parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--report", type=Path, default=Path("gpu_report"), help="path without a suffix")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="total seconds (default: 540)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--jobs", type=int, help="checks without timings that run at the same time")
    options = parser.parse_args()
    began = time.monotonic()
    prepare_environment(options.device)

    from benchmarks.on_gpu.run import run  # imports torch, which reads the environment

    sys.exit(
        run(
            options.device,
            {part: PARTS[part] for part in PARTS if part in options.parts or part == "machine"},
            path=options.report,
            limit_s=options.limit_s,
            num_jobs=options.jobs,
            began=began,
        )
    )


def prepare_environment(device: str) -> None:
    """Let child processes import the checkout; on a CPU, use one thread per process."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    importlib.invalidate_caches()


if __name__ == "__main__":
    main()
