"""Case g: the peak resident memory of a training run, and its growth after the batches were made."""

import importlib
import json
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.resident import resident_mib
from benchmarks.steps import work
from benchmarks.turns import Turns


def main() -> None:
    """Train with benchmarks.steps.raw or ours; memory for its import is included."""
    torch.set_num_threads(1)
    batches = work.Batches(work.make_batches(5000), Turns())
    before = resident_mib("VmHWM")
    candidate = importlib.import_module(f"benchmarks.steps.{sys.argv[1]}")
    with tempfile.TemporaryDirectory() as folder:
        trained = candidate.train(batches, "accuracy", Path(folder))
    peak = resident_mib("VmHWM")
    print(json.dumps({"peak_mib": peak, "grown_mib": peak - before, "same": {"loss": trained.loss}}))


if __name__ == "__main__":
    main()
