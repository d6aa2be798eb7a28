"""Case g: the largest resident memory of a training run, and what of it came after the batches were made."""

import importlib
import json
import resource
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.steps import work
from benchmarks.turns import Turns


def peak_mib() -> float:
    """Return the largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    """Train as benchmarks.steps.raw or ours does; importing it counts."""
    torch.set_num_threads(1)
    batches = work.Batches(work.make_batches(5000), Turns())
    before = peak_mib()
    candidate = importlib.import_module(f"benchmarks.steps.{sys.argv[1]}")
    with tempfile.TemporaryDirectory() as folder:
        trained = candidate.train(batches, "accuracy", Path(folder))
    print(json.dumps({"peak_mib": peak_mib(), "grown_mib": peak_mib() - before, "same": {"loss": trained.loss}}))


if __name__ == "__main__":
    main()
