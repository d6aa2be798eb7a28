"""Twelve programs beside their hand-written loops: the same numbers in one process, in two, and after a resume.

Each file has the `loop`, and the same as a user of runnerkit writes it: a class, if one is needed, and `train`. What
both call is above them. RUNNERKIT_WRITE_PROGRAMS_TABLE=1 writes the table of docs/own_steps.md.
"""

import inspect
import os
import signal
from contextlib import contextmanager
from functools import cache, partial
from itertools import cycle, zip_longest
from pathlib import Path

import pytest
import torch

from benchmarks.results import read_section, write_section
from runnerkit import dl
from runnerkit.types import as_dict
from tests.engines.together import together
from tests.faults.kills import Send, exit_code_of
from tests.interrupt import Interrupt
from tests.programs import (
    byol,
    ctc,
    diffusion,
    draws,
    endless_stream,
    graphs,
    long_sampler,
    maml,
    ppo,
    sam,
    schedule_free,
    sparse_embeddings,
    wgan_gp,
)

PROGRAMS = {
    "PPO": ppo,
    "SAM": sam,
    "WGAN-GP": wgan_gp,
    "MAML": maml,
    "BYOL": byol,
    "CTC": ctc,
    "graphs": graphs,
    "schedule-free": schedule_free,
    "sparse embeddings": sparse_embeddings,
    "sampler of 10^10": long_sampler,
    "endless stream": endless_stream,
    "diffusion": diffusion,
}
PAGE = Path(__file__).parents[2] / "docs" / "own_steps.md"
COMMAND = "RUNNERKIT_WRITE_PROGRAMS_TABLE=1 pytest tests/programs/test_programs.py -k table"
BATCH_SIZE = 8  # samples of a global batch; the last one of an epoch may have one, so that a process is idle
CUT = 5  # batches before a run is interrupted, within its second epoch
TOLERANCE = 1e-7  # of weights of the order of 1: sums over processes are added in another order
SILENT = dict.fromkeys(("console", "csv", "tensorboard"))


class Losses(dl.Callback):
    """A callback that lists the loss of each training batch: that of the global batch."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.Metric)
        self.own, self.values = [], []

    def on_batch_end(self, runner):
        weight = runner.batch_size if runner.batch_weight is None else runner.batch_weight
        self.own.append((runner.batch_metrics["loss"].detach(), weight))

    def on_loader_end(self, runner):
        of_all = runner.engine.gather_object(self.own)
        self.own = []
        for batch in zip_longest(*of_all, fillvalue=(torch.zeros(()), 0)):  # the last may belong to one process
            losses, weights = zip(*batch, strict=True)
            self.values.append(torch.stack(losses) @ (torch.tensor(weights) / sum(weights)))


@contextmanager
def float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def values_of(models):
    """Return all weights and buffers as one vector."""
    states = [each.state_dict() for _, each in sorted(as_dict(models).items())]
    return torch.cat([each.flatten() for state in states for each in state.values()]).double()


@cache
def by_loop(name, num_processes=1):
    """Return the weights and losses of the hand-written loop over global batches."""
    torch.manual_seed(42)
    with float64(), draws.of_processes(num_processes):
        models, losses = PROGRAMS[name].loop(BATCH_SIZE)
    return values_of(models), torch.stack(losses)


def train(name, *, engine=None, folder=None, interrupt=(), **options):
    """Return the weights, the losses and the runner of the program, which saves each step in `folder`, if given."""
    engine, losses = engine or dl.CPUEngine(), Losses()
    saver = [dl.CheckpointCallback(folder, content="runner", every_steps=1)] if folder else []
    callbacks = [losses, *saver, *interrupt]
    with float64():
        runner = PROGRAMS[name].train(
            BATCH_SIZE // engine.num_processes, engine=engine, callbacks=callbacks, loggers=SILENT, **options
        )
    return values_of(runner.model), torch.stack(losses.values), runner


@cache
def uninterrupted(name):
    return train(name)


def by_limit(name, folder, **options):
    runner = uninterrupted(name)[2]
    train(name, folder=folder, num_steps=CUT * runner.optimizer_step // runner.batch_step, **options)


def by_exception(name, folder):
    with pytest.raises(KeyboardInterrupt):
        train(name, folder=folder, interrupt=[Interrupt(CUT + 1)])


def by_kill(name, folder):
    kill = Send(signal.SIGKILL, step=CUT + 1)
    assert exit_code_of(lambda: train(name, folder=folder, interrupt=[kill])) == -signal.SIGKILL


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_equals_its_loop(name):
    """All weights and losses, bit for bit."""
    weights, losses, _ = uninterrupted(name)

    expected, expected_losses = by_loop(name)
    assert torch.equal(losses, expected_losses)
    assert torch.equal(weights, expected)


INTERRUPTED = [*zip(cycle([by_limit, by_exception]), PROGRAMS), (by_kill, "PPO"), (by_kill, "endless stream")]


@pytest.mark.parametrize(("interrupt", "name"), INTERRUPTED)
def test_an_interrupted_program_resumes(interrupt, name, tmp_path):
    """Within an epoch, to the same weights and losses, bit for bit."""
    interrupt(name, tmp_path)

    weights, losses, _ = train(name, folder=tmp_path, resume=tmp_path)

    expected, expected_losses, _ = uninterrupted(name)
    assert torch.equal(losses, expected_losses[CUT:])
    assert torch.equal(weights, expected)


def in_two_processes(folder):
    """Train each program in processes that exist, and some in two parts or under FSDP2."""
    ddp = dl.DistributedDataParallelEngine(2, device="cpu")
    found = {(name, "whole"): train(name, engine=ddp)[:2] for name in PROGRAMS}
    for name in ("PPO", "endless stream", "diffusion"):
        by_limit(name, folder / name, engine=ddp)
        found[name, "resumed"] = train(name, folder=folder / name, resume=folder / name, engine=ddp)[:2]
    fsdp = dl.FullyShardedDataParallelEngine(2, device="cpu")
    found |= {(name, "FSDP2"): train(name, engine=fsdp)[:2] for name in ("BYOL", "WGAN-GP")}
    by_limit("WGAN-GP", folder, engine=fsdp)
    found["WGAN-GP", "FSDP2 resumed"] = train("WGAN-GP", folder=folder, resume=folder, engine=fsdp)[:2]
    return found


@pytest.mark.slow
def test_in_two_processes_a_program_equals_its_loop_over_global_batches(tmp_path):
    """Each process draws its own numbers for its rows, and so does the loop. An interrupted run resumes bit for bit."""
    found = together(partial(in_two_processes, tmp_path))

    for (name, how), (weights, losses) in found.items():
        expected, expected_losses = by_loop(name, num_processes=2)
        assert (weights - expected).abs().max() < TOLERANCE, (name, how)
        if "resumed" in how:
            whole, whole_losses = found[name, "FSDP2" if "FSDP2" in how else "whole"]
            assert torch.equal(weights, whole), (name, how)
            assert torch.equal(losses, whole_losses[CUT:]), (name, how)
        else:
            assert (losses - expected_losses).abs().max() < TOLERANCE, (name, how)


def test_the_table_of_the_page():
    """It lists lines of code; the differences are those that the tests above allow."""
    rows = [
        "| program | lines of the loop | lines with runnerkit | one process | two processes | after a resume |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, module in PROGRAMS.items():
        with_runnerkit = num_lines(module.train) + (num_lines(module.Program) if hasattr(module, "Program") else 0)
        link = f"[{name}](../tests/programs/{Path(module.__file__).name})"
        rows.append(f"| {link} | {num_lines(module.loop)} | {with_runnerkit} | 0 | under 1e-7 | 0 |")
    table = "\n".join(rows)
    if os.environ.get("RUNNERKIT_WRITE_PROGRAMS_TABLE"):
        write_section("programs", table, PAGE, command=COMMAND)

    assert read_section("programs", PAGE, command=COMMAND) == table


def num_lines(part):
    """Count the lines of a function or class that are not blank."""
    return sum(bool(line.strip()) for line in inspect.getsource(part).splitlines())
