"""Import `program.py` from the working directory, and save what its `train` returns in each way it is meant to run.

python tests/migration/run_program.py whole amp resumed
"""

import inspect
import multiprocessing
import os
import sys
from pathlib import Path

import torch

# The number of epochs of each call, one call after the other, and the arguments.
RUNS = {"whole": ([5], {}), "amp": ([5], {"amp": True}), "resumed": ([2, 5], {}), "processes": ([5], {"ddp": True})}


def run(name):
    """Save the rows of five epochs and the best weights."""
    import program

    lengths, options = RUNS[name]
    takes = inspect.signature(program.train).parameters
    rows = []
    for num_epochs in lengths:
        history, model = program.train(num_epochs, name, **{key: options[key] for key in options if key in takes})
        rows += history[len(rows) - num_epochs :]  # some return all epochs after a resume, some only their own
    if os.environ.get("RANK", "0") == "0":
        torch.save({"rows": torch.tensor(rows, dtype=torch.float64), "weights": model.state_dict()}, f"{name}.pt")


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    import program  # noqa: F401  # once; the children below have it then

    for each in sys.argv[1:]:
        # A process for each: the settings of an Accelerator are its process's for good.
        child = multiprocessing.get_context("fork").Process(target=run, args=(each,))
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(f"{each}: exit code {child.exitcode}")
