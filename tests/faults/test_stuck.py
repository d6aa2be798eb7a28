"""If a process does not end, the job still ends and reports which one was stuck and why it failed."""

import os
import subprocess
import sys
import time

import pytest
from torch.utils.data import DataLoader, Dataset

from runnerkit import dl
from runnerkit.engines.communicators.process_group import ProcessGroup
from runnerkit.engines.launch import spawn
from runnerkit.loop import listeners
from tests.free_port import free_port
from tests.tiny import classification, loader, train

LIMIT_S = 40  # per job, on a busy machine; a stuck process blocks for 600 s


class HangsAfterAnError(dl.Callback):
    """A callback that raises in one rank and does not return from on_exception there."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_experiment_start(self, runner):
        listeners.EXCEPTION_HOOKS_S = 1.0

    def on_batch_end(self, runner):
        if runner.engine.rank == self.rank:
            raise LookupError("the real error")

    def on_exception(self, runner):
        if runner.engine.rank == self.rank:
            time.sleep(600)


class HangsAtExit(dl.Callback):
    """A callback that raises in rank 1, whose process then does not end."""

    def on_batch_end(self, runner):
        if runner.engine.rank == 1:
            import atexit

            atexit.register(time.sleep, 600)
            raise LookupError("the real error")


class Slow(Dataset):
    """A data set in which one sample of rank 1 never arrives."""

    def __init__(self):
        self.data = classification(64)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 5:
            time.sleep(600)
        return self.data[index]


def fit(*callbacks, timeout_s=600, data=None):
    loaders = {"train": loader(32, 4) if data is None else DataLoader(data, batch_size=2, num_workers=2)}
    engine = dl.DistributedDataParallelEngine(2, device="cpu", timeout_s=timeout_s)
    train(loaders=loaders, callbacks=callbacks, engine=engine)


def launched(folder, call, *, num_awaited=2):
    """Start both ranks like a launcher, which kills the rest in the end; return their standard error and exit codes."""
    script = folder / "script.py"
    script.write_text(f"from tests.faults.test_stuck import *\n{call}\n")
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **place, "PYTHONPATH": os.getcwd()}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)], stderr=subprocess.PIPE, text=True,
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        for rank in ranks[:num_awaited]:
            rank.wait(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()  # then its loader's workers end too
    return [(rank.communicate()[1], rank.returncode) for rank in ranks]


def test_a_hook_that_hangs_after_an_error_does_not_hide_it():
    """The error is recorded before the hook is called, which has a deadline; no rank waits for timeout_s."""
    with pytest.raises(LookupError, match="the real error") as caught:
        fit(HangsAfterAnError(1), timeout_s=LIMIT_S)

    assert any("HangsAfterAnError.on_exception did not end within 1 s" in note for note in caught.value.__notes__)
    assert any("in batch 1 of loader 'train', epoch 1, rank 1" in note for note in caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_that_hangs_under_a_launcher_does_not_hide_the_error(tmp_path, rank):
    """The failed rank ends after the deadline with its traceback; the other one gets it if rank zero is alive."""
    told = launched(tmp_path, f"fit(HangsAfterAnError({rank}))")

    assert [code for _, code in told] == [1, 1]
    assert "LookupError: the real error" in told[rank][0]
    assert "HangsAfterAnError.on_exception did not end within 1 s" in told[rank][0]
    if rank == 1:
        assert "LookupError: the real error" in told[0][0]


def test_a_rank_that_failed_and_does_not_end_is_ended(monkeypatch):
    """For example, a worker that cannot be ended keeps its process from exiting."""
    monkeypatch.setattr(spawn, "AFTER_FAILURE_S", 1.0)

    with pytest.raises(LookupError, match="the real error"):
        fit(HangsAtExit(), timeout_s=LIMIT_S)


def end_before_the_group(rank):
    """Let a rank end after it has joined the others' store."""
    if os.environ["RANK"] == str(rank):
        ProcessGroup._make_group = lambda *_, **__: os._exit(3)
    fit(timeout_s=4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_before_the_group_is_made_is_named(tmp_path, rank):
    """The other one does not wait for longer than timeout_s."""
    told = launched(tmp_path, f"end_before_the_group({rank})")

    assert [code for _, code in told] == [3, 1][:: 1 if rank == 0 else -1]
    said = told[1 - rank][0]
    if rank == 0:  # while rank 1 joins the store or, usually, the group
        assert "rank 0, which serves the job's store, has ended" in said
    else:
        assert "rank 0 of 2 cannot make the process group: rank 1 is missing after 4 s" in said


STUCK = "rank 1 of 2 is stuck: it is waiting for worker "


def test_a_data_worker_that_hangs_is_named():
    """The rank whose loader it serves reports it, besides the timeout of the rank that waits for that one."""
    with pytest.raises(RuntimeError, match=STUCK):
        fit(timeout_s=4, data=Slow())


@pytest.mark.slow
def test_a_data_worker_that_hangs_is_named_under_a_launcher(tmp_path):
    """The error does not claim that the rank ended silently; its launcher ends it."""
    (errors, code), _ = launched(tmp_path, "fit(timeout_s=4, data=Slow())", num_awaited=1)

    assert code == 1
    assert STUCK in errors
    assert "without an error report" not in errors
