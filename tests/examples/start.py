"""Start an example as its users do, from the root of a checkout, with plain python or a launcher; interrupt it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = "torchrun --standalone --nproc-per-node=2"
# Programs that are run as modules of this Python, whose processes are forked: see tests/warm_python.py.
_MODULES = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "horovodrun": ["-m", "horovod.runner.launch"]}


def start(command: str, folder: Path, *options: object, timeout_s: float = 400, **variables: str) -> str:
    """Run a command in `folder` and return its output; fail if the command fails.

    Args:
        command: the command as a page has it, with scripts below ``examples/``.
        folder: the command's working directory.
        options: further arguments of the command.
        timeout_s: time limit, after which the command has failed.
        variables: additional environment variables.
    """
    program, *words = [*shlex.split(command), *map(str, options)]
    start = [sys.executable, *_MODULES[program]] if program in _MODULES else [program]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(
        [*start, *(str(ROOT / word) if word.startswith("examples/") else word for word in words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def whole_and_resumed(main, runner_class, arguments, folder, *, epoch: int, batch: int):
    """Return the runner of a whole run, and of one that failed in a training batch and was resumed."""
    handle_batch = runner_class.handle_batch

    def fail(runner, data):
        if runner.is_train_loader and (runner.epoch_step, runner.loader_batch_step) == (epoch, batch):
            raise RuntimeError("the power is gone")
        handle_batch(runner, data)

    whole = main([*arguments, "--logdir", str(folder / "whole")])
    with mock.patch.object(runner_class, "handle_batch", fail), pytest.raises(RuntimeError, match="the power is gone"):
        main([*arguments, "--logdir", str(folder / "parts")])
    return whole, main([*arguments, "--logdir", str(folder / "parts"), "--resume"])
