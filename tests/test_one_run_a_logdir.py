"""Tests that a logdir has one run at a time and that a killed run does not block it."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

from runnerkit import dl
from runnerkit.storage import logdir_lock
from runnerkit.storage.logdir_lock import FILE, holder, is_held, lock
from tests.interrupt import at
from tests.tiny import train


class Holder:
    """Forked process that locks a logdir, as a run does, and sleeps.

    Args:
        with_worker: fork one more process, which outlives it, as a data loader's worker process may.
        leaves_after_s: seconds before the process ends.
    """

    def __init__(self, logdir, *, with_worker=False, leaves_after_s=60.0):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                lock(logdir)
                self.worker = os.fork() if with_worker else 0
                if self.worker or not with_worker:
                    os.write(writing, f"{self.worker}\n".encode())
                time.sleep(leaves_after_s)
            finally:
                os._exit(1)
        with open(reading) as said:
            os.close(writing)
            self.worker = int(said.readline())

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def held(tmp_path):
    """Return a logdir and the process that has locked it."""
    other = Holder(tmp_path / "log", with_worker=True)
    yield tmp_path / "log", other
    with suppress(ProcessLookupError, ChildProcessError):
        other.kill()
    with suppress(ProcessLookupError):
        os.kill(other.worker, signal.SIGKILL)


def fit(logdir, *callbacks, **options):
    return train(logdir=logdir, callbacks=callbacks, **{"resume": "auto", **options})


def test_a_second_run_is_refused_and_told_whose_the_logdir_is_until_the_first_is_killed(held):
    """After a kill the logdir is free at once, even if a forked worker process still has the lock file open."""
    logdir, other = held

    with pytest.raises(FileExistsError) as refused:
        fit(logdir)
    inside = sorted(path.name for path in logdir.iterdir())
    other.kill()
    runner = fit(logdir)

    assert f"another run is writing to {logdir}: process {other.pid} on " in str(refused.value)
    assert f"if its machine is dead, delete {logdir / FILE}" in str(refused.value)
    assert inside == [FILE], "the second run must not write"
    os.kill(other.worker, 0)  # is alive
    assert runner.epoch_step == 1


def test_the_second_is_refused_in_the_middle_of_the_first_which_goes_on(tmp_path):
    """A second run, even an evaluation that only logs to the logdir, is refused, and the first run continues."""
    logdir = tmp_path / "log"
    said = []
    code = f"""
        from pathlib import Path
        from runnerkit import dl
        from tests.test_one_run_a_logdir import fit
        from tests.tiny import loader, mlp

        class Evaluate(dl.SupervisedRunner):
            def get_loggers(self): return {{"csv": dl.CSVLogger({str(logdir)!r})}}
            def get_loaders(self, stage): return {{"valid": loader(8, 4)}}

        for run in (lambda: fit(Path({str(logdir)!r}), num_epochs=9), Evaluate(mlp()).run):
            try:
                run()
            except FileExistsError as error:
                print(error)
        """

    def second(runner):
        if runner.epoch_step == 2:
            command = [sys.executable, "-c", textwrap.dedent(code)]
            said.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    runner = fit(logdir, at("on_epoch_end", second, order=dl.CallbackOrder.External), num_epochs=3)

    assert said[0].count(f"another run is writing to {logdir}: process {os.getpid()} on ") == 2
    assert runner.epoch_step == 3 and len((logdir / "csv" / "train.csv").read_text().splitlines()) == 4


def test_one_process_runs_again_and_again_in_a_logdir(tmp_path):
    """One process can run repeatedly in a logdir, even after an error, and no lock is left."""

    fail = at("on_epoch_end", lambda runner: 1 / 0, order=dl.CallbackOrder.External)
    fit(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, fail, num_epochs=2)
    runner = fit(tmp_path, num_epochs=2)

    assert runner.epoch_step == 2 and holder(tmp_path) is None
    Holder(tmp_path).kill()  # free for another process too


def test_of_several_processes_rank_zero_is_refused_and_all_end_with_its_words(held):
    """Only rank zero requests the lock, and all ranks end with its error."""
    logdir, other = held

    with pytest.raises(FileExistsError, match=f"another run is writing to .*: process {other.pid} on"):
        fit(logdir, num_processes=2)

    assert sorted(path.name for path in logdir.iterdir()) == [FILE]


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_written_to_all_the_same(tmp_path, monkeypatch, caplog, error):
    """On a file system without locks, the run writes to the logdir and warns."""

    def no_lock(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "lockf", no_lock)

    runner = fit(tmp_path)

    assert runner.epoch_step == 1
    assert f"{tmp_path} cannot be locked ([Errno {error}] {os.strerror(error)}): make sure that no other" in caplog.text


def test_a_killed_process_may_take_a_moment_to_be_gone(tmp_path, monkeypatch):
    """A run waits for a lock to be released, usually two seconds."""
    monkeypatch.setattr(logdir_lock, "_PATIENCE_S", 30.0)
    other = Holder(tmp_path, leaves_after_s=0.5)

    unlock = lock(tmp_path)

    unlock()
    os.waitpid(other.pid, 0)


def test_a_file_deleted_and_made_anew_while_it_was_being_locked_is_not_the_lock(tmp_path, monkeypatch):
    """If the previous run deletes the lock file meanwhile, the new file is locked, as seen by another process."""
    lockf, files = fcntl.lockf, [b"old", b"new"]

    def late(descriptor, operation):
        if files:
            (tmp_path / FILE).unlink()
            (tmp_path / FILE).write_bytes(files.pop())
        lockf(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", late)

    unlock = lock(tmp_path)

    files.clear()
    pid = os.fork()
    if pid == 0:
        os._exit(is_held(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    unlock()


def _take_turns(logdir, record, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        unlock = lock(Path(logdir))
        try:
            os.close(os.open(record, os.O_CREAT | os.O_EXCL))  # fails if another process holds the lock too
            os.unlink(record)
        finally:
            unlock()


def test_processes_that_take_turns_are_never_in_the_folder_together(tmp_path):
    """Processes that lock and unlock in turn, which deletes the lock file each time, never hold the lock together."""
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "log"), str(tmp_path / "in_use"), 1.0)
    processes = [context.Process(target=_take_turns, args=arguments) for _ in range(4)]

    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0] * 4
