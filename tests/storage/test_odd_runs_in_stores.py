"""Tests of uncommon runs in stores: odd names, copied runs, signals at the end, damaged objects, two runs at once."""

import os
import signal
import threading

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from runnerkit import read_metrics
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.storage.remote import store, uploads
from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.remote.logdir import StoredLogdir
from runnerkit.storage.remote.store import Store
from runnerkit.storage.remote.urls import local_path
from tests.storage.stored_runs import At, objects, saving, train

URL = "memory://runs/mine"


pytestmark = pytest.mark.usefixtures("short_times")


@pytest.mark.skipif(os.name == "nt", reason="Windows does not have such names")
def test_names_of_files_may_be_odd():
    """Everything that a run writes can be read again."""
    names = {"trace_12:30.json", "a\\b.txt", "plots/.hidden"}

    def write():
        (local_path(URL) / "plots").mkdir()
        for name in names:
            (local_path(URL) / name).write_text("text")

    train(URL, At(write, step=1), num_epochs=1)

    assert train(URL, num_epochs=2).epoch_step == 2
    assert names <= set(objects(URL))


def test_a_copied_run_without_a_manifest_is_not_overwritten(tmp_path):
    """The error says how to continue it, which works."""
    train(tmp_path / "run", num_epochs=1)
    MemoryFileSystem().put(f"{tmp_path}/run", "/runs/mine", recursive=True)
    before = {name: MemoryFileSystem().cat(f"/runs/mine/{name}") for name in objects(URL)}

    with pytest.raises(FileExistsError, match=r"memory://runs/mine holds .* of another run, but no manifest.json"):
        train(URL)

    assert before == {name: MemoryFileSystem().cat(f"/runs/mine/{name}") for name in objects(URL)}
    assert train("memory://runs/other", resume=URL).epoch_step == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_last_upload_waits_for_it(faulty, number, monkeypatch):
    """Otherwise the only copy of the last checkpoints is on a machine that may be about to go."""
    sent = threading.Event()

    def fault(operation, path):
        if operation == "put" and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), number)

    def close(logdir):
        faulty.fail(fault)
        (local_path("faulty://runs/mine") / "late.txt").write_text("not uploaded yet")
        close_it(logdir)

    close_it = StoredLogdir.close
    monkeypatch.setattr(StoredLogdir, "close", close)
    heard = []
    before = signal.signal(number, lambda *_: heard.append(number))
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(signal, "raise_signal", heard.append)
            train("faulty://runs/mine")
    finally:
        signal.signal(number, before)

    assert sent.is_set() and heard == [number]
    assert load_checkpoint(local_copy("faulty://runs/mine") / "checkpoints" / "last.pth")["counters"]["epoch_step"] == 2


def test_what_could_not_be_uploaded_is_set_aside(faulty, staging, monkeypatch, caplog):
    """The next run does not use it, as the store decides, but does not delete it either."""
    url = "faulty://runs/mine"
    monkeypatch.setattr(uploads, "PATIENCE_S", 0.3)
    monkeypatch.setattr(store, "PATIENCE_S", 0.3)
    with pytest.raises(OSError, match="the next run of this logdir on this machine sets it aside"):
        train(url, saving(url), At(lambda: faulty.fail_times(10**9, TimeoutError("gone")), step=3))
    faulty.fail(lambda operation, path: None)

    train(url, saving(url))

    [kept] = staging.glob("*.kept-*")
    assert load_checkpoint(kept / "checkpoints" / "last.pth")["counters"]["epoch_step"] == 2
    assert f"is in {kept}" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_damaged_or_missing_checkpoint_falls_back_to_the_one_before(damage, caplog):
    """As on a disk."""
    train(URL, saving(URL, keep_best=1, save_best=False))
    last = CheckpointFolder(local_copy(URL) / "checkpoints").records[-1]
    name = f"/runs/mine/checkpoints/objects/{last.sha256}"
    memory = MemoryFileSystem()
    if damage == "flip":
        data = memory.cat(name)
        memory.pipe(name, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    else:
        memory.rm(name)

    runner = train(URL, saving(URL), num_epochs=3)

    assert runner.epoch_step == 3 and "is missing or damaged" in caplog.text
    assert f"resumed from {URL}/checkpoints/{last.name}" not in caplog.text
    assert list(read_metrics(URL).query("loader == 'valid' and metric == 'loss'")["epoch"]) == [1, 2, 3]


def test_the_staging_folder_may_change_between_construction_and_run(tmp_path, monkeypatch):
    """The run writes to the store, wherever its files were to be staged."""
    monkeypatch.setenv("RUNNERKIT_STAGING", str(tmp_path / "a"))
    callback = saving(URL)
    monkeypatch.setenv("RUNNERKIT_STAGING", str(tmp_path / "b"))

    train("memory://runs/logs", callback, num_epochs=1)

    assert "manifest.json" in objects(URL)


def test_a_relative_staging_folder_and_another_working_directory(tmp_path, monkeypatch):
    """The folder stays where it was first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNERKIT_STAGING", "stage")
    (tmp_path / "elsewhere").mkdir()

    train(URL, At(lambda: os.chdir(tmp_path / "elsewhere"), step=1), num_epochs=1)

    assert "csv/train.csv" in objects(URL) and not (tmp_path / "elsewhere" / "stage").exists()


def test_a_second_run_of_the_same_process_is_refused():
    """For example in another cell's thread of a notebook; the first one continues."""
    errors = []

    def second():
        try:
            train(URL)
        except FileExistsError as error:
            errors.append(str(error))

    def start():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    runner = train(URL, At(start, step=2))

    assert runner.epoch_step == 2 and "another run of this process is writing to memory://runs/mine" in errors[0]
    assert Store(URL).read("lease.json") is None
