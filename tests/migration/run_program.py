"""Import `program.py` from the working directory, and save what its `train` returns for each run named.

python tests/migration/run_program.py whole amp resumed
"""

import faulthandler
import inspect
import multiprocessing
import os
import sys
from pathlib import Path

import torch

HANGS_AFTER_S = 200  # a run takes ten seconds

# The number of epochs of each successive call, and the arguments of all calls.
RUNS = {"whole": ([5], {}), "amp": ([5], {"amp": True}), "resumed": ([2, 5], {}), "processes": ([5], {"ddp": True})}


def run(name):
    """Save the rows of five epochs and the best weights."""
    import program

    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    lengths, options = RUNS[name]
    takes = inspect.signature(program.train).parameters
    rows = []
    for num_epochs in lengths:
        history, model = program.train(num_epochs, name, **{key: options[key] for key in options if key in takes})
        rows += history[len(rows) - num_epochs :]  # some return all epochs after a resume, some only the new ones
    if os.environ.get("RANK", "0") == "0":
        torch.save({"rows": torch.tensor(rows, dtype=torch.float64), "weights": model.state_dict()}, f"{name}.pt")


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    import program  # noqa: F401  # imported once; the child processes below inherit it

    for each in sys.argv[1:]:
        # One process per run, because an Accelerator's settings last as long as its process.
        child = multiprocessing.get_context("fork").Process(target=run, args=(each,))
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(f"{each}: exit code {child.exitcode}")
