"""A hanging run reports the location in each process and ends."""

import os
import subprocess
import sys

import pytest

from runnerkit import dl
from runnerkit.callbacks.debug import hang

SCRIPT = """
import ctypes, sys, threading, time
from runnerkit import dl
from tests.tiny import loader, train

class StandStill(dl.Callback):
    def on_batch_end(self, runner):
        if runner.batch_step == 3 and runner.engine.rank == {rank}:
            self.wait_for_ever()

    def wait_for_ever(self):
        {how}

class Watch(dl.HangCallback):
    def on_stage_start(self, runner):
        self.timeout_s += runner.engine.rank  # processes do not notice at the same time
        super().on_stage_start(runner)

callbacks = [StandStill(dl.CallbackOrder.External), Watch(3)]
train(loaders={{"train": loader(80, 4)}}, callbacks=callbacks, num_processes={num_processes})
"""

STAGES = """
import time
from runnerkit import dl
from tests.tiny import loader, mlp

class Stages(dl.IRunner):
    stages = ["train_1", "train_2"]

    def get_engine(self):
        return dl.CPUEngine()

    def get_model(self, stage):
        return mlp()

    def get_loaders(self, stage):
        time.sleep(3 if stage == "train_2" else 0)
        return {"train": loader(8, 4)}

    def get_callbacks(self, stage):
        return {"hang": dl.HangCallback(2), "stand_still": StandStill(dl.CallbackOrder.External)}

    def handle_batch(self, batch):
        pass

class StandStill(dl.Callback):
    def on_stage_end(self, runner):
        if runner.stage_key == "train_2":
            time.sleep(1e6)

Stages().run()
"""


def start(tmp_path, how, *, rank=0, num_processes=1):
    return start_script(tmp_path, SCRIPT.format(how=how, rank=rank, num_processes=num_processes))


def start_script(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


def test_it_tells_where_it_stands(tmp_path):
    """The output has the source line and the current batch; the exit code is 70."""
    done = start(tmp_path, "threading.Event().wait()")

    assert done.returncode == 70, done.stderr
    assert "rank 0 of 1 has made no progress for 3 s in loader 'train', epoch 1, batch 3; exiting" in done.stderr
    assert "in wait_for_ever" in done.stderr


def test_also_while_the_interpreters_lock_is_held(tmp_path):
    """An extension that never releases the GIL stops every Python thread."""
    done = start(tmp_path, "ctypes.PyDLL(None).pause()")

    assert done.returncode == 1, done.stderr
    assert "in wait_for_ever" in done.stderr


def test_each_process_tells_where_it_stands(tmp_path):
    """One rank waits for the other, whose stack shows the cause."""
    done = start(tmp_path, "time.sleep(1e6)", rank=1, num_processes=2)

    assert done.returncode == 1
    assert "rank 0 of 2 has made no progress for 3 s" in done.stderr
    assert "rank 1 of 2 has made no progress for 4 s" in done.stderr and "in wait_for_ever" in done.stderr
    assert "hung and was ended by its HangCallback" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_stacks_of_several_processes_do_not_mix(is_disk_full, monkeypatch, capfd):
    """Each is written in one call if possible; it is written in any case, and the process ends."""

    def end(code):
        raise SystemExit(code)

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    written = []
    monkeypatch.setattr(hang.os, "_exit", end)
    monkeypatch.setattr(hang.os, "write", lambda _, text: written.append(text.decode()))
    if is_disk_full:
        monkeypatch.setattr(hang.tempfile, "TemporaryFile", fail)
    runner = dl.SupervisedRunner()
    runner.engine = dl.CPUEngine()
    watch = hang._Watch(1e6, runner)

    with pytest.raises(SystemExit):
        watch._end()
    watch.stop()

    [text] = written
    assert "has made no progress for 1e+06 s" in text
    assert ("No space left" in text) is is_disk_full
    assert "in test_stacks_of_several_processes_do_not_mix" in (capfd.readouterr().err if is_disk_full else text)


MOVES = """
import time
from torch.utils.data import DataLoader, Dataset
from runnerkit import dl
from tests.tiny import classification, loader, mlp, train

class SlowCallback(dl.Callback):
    def on_batch_end(self, runner):
        time.sleep(0.5)

class SlowData(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.125)
        return classification(40)[index]

{run}
"""
RUNS = {
    "batches": "train(loaders={'train': loader(40, 4)}, callbacks=[SlowCallback()], hang_timeout_s=3); time.sleep(4)",
    "a callback's pass": "train(mlp(batch_norm=True), loaders={'train': DataLoader(SlowData(), 4)}, "
    "callbacks=[dl.SWACallback(1)], hang_timeout_s=3)",
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_moves_is_left_alone(tmp_path, run):
    """A run may take longer in total than the limit, and the watch ends with it.

    SWACallback's pass, which updates batch norm statistics after the last epoch, does not emit events.
    """
    done = start_script(tmp_path, MOVES.format(run=RUNS[run]))

    assert done.returncode == 0, done.stderr


def test_the_making_of_a_stage_is_not_watched_but_its_end_is(tmp_path):
    """Loading data may take long, but a callback that never returns is an error even after the last epoch."""
    done = start_script(tmp_path, STAGES)

    assert done.returncode == 70, done.stderr
    assert "has made no progress for 2 s in loader 'train', epoch 2, batch 2; exiting" in done.stderr
    assert "in on_stage_end" in done.stderr
