"""Tests of whole runs in a store: they are equal to runs on a disk, whatever happens between them and the store."""

import itertools
import json
import threading
import time
from pathlib import Path

import pytest
import torch

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.storage import claims
from runnerkit.storage.remote import store, uploads
from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.remote.lease import LeaseLost
from runnerkit.storage.remote.store import Store
from runnerkit.storage.remote.urls import local_path, url_of
from tests.faults.fingerprint import differences, fingerprint
from tests.storage.stored_runs import NUM_STEPS, At, named, objects, saving, train
from tests.tiny import mlp, weights

URL = "memory://runs/mine"
FAULTY = "faulty://runs/mine"


@pytest.fixture(autouse=True)
def logs_at_once(short_times, monkeypatch):
    """Wait for nothing long; upload logs at each flush."""
    monkeypatch.setattr(uploads, "LOGS_EVERY_S", 0.0)


def files(folder):
    """Return the names of a logdir's files; those of TensorBoard contain the time."""
    names = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    return sorted(name.partition("events.out")[0] for name in names)


def impatient(monkeypatch, patience_s):
    """Wait for a store that fails only so long."""
    monkeypatch.setattr(store, "FIRST_PATIENCE_S", patience_s)
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "patience_s", patience_s)
    monkeypatch.setattr(uploads, "PATIENCE_S", patience_s)


def assert_equal_to_one_on_a_disk(url, folder, **options):
    """Train the run on a disk and compare; nothing else is left in the store."""
    train(folder, saving(folder), **options)
    assert differences(fingerprint(folder), fingerprint(local_copy(url))) == []
    assert objects(url) == named(url)


def stop():
    raise InterruptedError("stopped by the test")


def test_a_run_in_a_store_has_the_files_of_one_on_a_disk(staging, tmp_path):
    """Their contents are equal; nothing is left on the disk, and no object that the manifest does not name."""
    train(tmp_path / "run", saving(tmp_path / "run"))
    runner = train(URL, saving(URL))

    copy = local_copy(URL)
    assert files(copy) == files(tmp_path / "run")
    assert differences(fingerprint(tmp_path / "run"), fingerprint(copy)) == []
    for name in ("hparams.yml", "csv/train.csv", "csv/valid.csv"):
        assert (copy / name).read_text() == (tmp_path / "run" / name).read_text()
    assert objects(URL) == named(URL) and runner.epoch_step == 2
    assert [path for path in staging.iterdir() if not path.name.startswith("copy-")] == []


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("step", [NUM_STEPS - 1, NUM_STEPS, NUM_STEPS + 3])
def test_a_run_that_continues_on_an_empty_disk_is_equal_to_one_that_was_not_interrupted(
    tmp_path, monkeypatch, step, asynchronous
):
    """Also from the middle of an epoch, line by line and bit by bit."""
    with pytest.raises(InterruptedError):
        train(URL, saving(URL, asynchronous=asynchronous), At(stop, step=step))
    monkeypatch.setenv("RUNNERKIT_STAGING", str(tmp_path / "other machine"))

    train(URL, saving(URL, asynchronous=asynchronous))

    assert_equal_to_one_on_a_disk(URL, tmp_path / "run")


@pytest.mark.parametrize(
    "options", [{"content": "model", "every_steps": None}, {"keep_best": 3}, {"save_best": False}], ids=repr
)
def test_options_of_checkpoints_mean_the_same_in_a_store(tmp_path, options):
    """Weights only, several best ones, and names."""
    for logdir in (tmp_path / "run", URL):
        train(logdir, saving(logdir, **options), resume=None, num_epochs=4)

    assert files(local_copy(URL)) == files(tmp_path / "run") and objects(URL) == named(URL)


def test_the_best_weights_are_loaded_at_the_end(tmp_path):
    """From the staging folder, which exists until then."""
    runners = [train(each, saving(each, load_best_on_end=True), num_epochs=4) for each in (tmp_path / "run", URL)]

    assert torch.equal(*(weights(each.model) for each in runners))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_a_failed_run_wrote_is_in_the_store(error):
    """The error itself is raised, and the next run can begin at once."""

    def fail():
        raise error("by the test")

    with pytest.raises(error, match="by the test"):
        train(URL, saving(URL), At(fail, step=NUM_STEPS + 3))

    copy = local_copy(URL)
    assert len((copy / "csv" / "train.csv").read_text().splitlines()) == 2
    assert load_checkpoint(copy / "checkpoints" / "last.pth")["counters"]["batch_step"] == NUM_STEPS + 2
    assert objects(URL) == named(URL) and "lease.json" not in objects(URL)


def test_a_run_that_fails_before_training_leaves_nothing():
    """As on a disk."""

    class Refuse(dl.Callback):
        def on_experiment_start(self, runner):
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        train(URL, saving(URL), Refuse(dl.CallbackOrder.Internal))

    assert objects(URL) == []


def test_refusals_name_the_url(monkeypatch):
    """Never the staging folder, which users do not know."""
    train(URL, saving(URL), num_epochs=1)
    before = {name: Store(URL).read(name)[0] for name in objects(URL)}
    refusals = []
    for resume in (None, "memory://runs/none", f"{URL}/checkpoints/model.0009.pth"):
        with pytest.raises((FileExistsError, FileNotFoundError)) as refused:
            train(URL, saving(URL), resume=resume)
        refusals.append(str(refused.value))

    assert f"{URL}/checkpoints holds the checkpoints of another run" in refusals[0]
    assert [each for each in refusals if "runs/" not in each or "staging" in each or ",," in each] == []
    assert {name: Store(URL).read(name)[0] for name in objects(URL)} == before


def test_a_run_of_several_processes_in_memory_is_refused():
    """They do not share it."""
    with pytest.raises(ValueError, match="memory://runs/mine is the memory of one process, and the run has 2"):
        train(URL, ddp=True)


def test_readers_never_see_a_part_of_a_checkpoint():
    """A run saves at each step and deletes old checkpoints, while another program copies and loads the last."""
    errors, num_read, ends = [], 0, threading.Event()

    def read():
        nonlocal num_read
        while not ends.is_set():
            try:
                for url in (URL, f"{URL}/checkpoints/last.pth"):
                    path = local_copy(url)
                    path = path if path.suffix else path / "checkpoints" / "last.pth"
                    if path.exists():
                        load_checkpoint(path)
                        num_read += 1
            except FileNotFoundError as error:
                if num_read:
                    errors.append(error)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=read)

    def wait():
        deadline = time.monotonic() + 30
        while num_read < 5 and time.monotonic() < deadline:
            time.sleep(0.01)

    thread.start()
    train(URL, saving(URL, every_steps=1), At(lambda: time.sleep(0.01)), At(wait, step=20), num_epochs=6)
    ends.set()
    thread.join()

    assert not errors, errors[:3]
    assert num_read >= 5


def test_objects_of_others_stay(tmp_path):
    """Beside the run, with similar names, and among its own."""
    others = {
        "runs/mine/notes.txt": b"1", "runs/mine/checkpoints/objects/notes": b"2", "runs/mine2/manifest.json": b"{}",
        "runs/mine/checkpoints/model.0001.pth": b"3", "runs/manifest.json": b"4", "runs/mine/csv/other.csv": b"5",
        f"runs/mine/checkpoints/objects/{'0' * 64}": b"6", "checkpoints/x": b"7",
    }  # fmt: skip
    root = Store("memory://runs")
    for name, data in others.items():
        root.fs.pipe_file(f"/{name}", data)

    train(URL, saving(URL), num_epochs=2)
    train(URL, saving(URL), num_epochs=4)

    assert {name: root.fs.cat_file(f"/{name}") for name in others} == others
    inside = {name.removeprefix("runs/mine/") for name in others if name.startswith("runs/mine/")}
    assert sorted({*named(URL), *inside}) == objects(URL)


def test_a_log_with_the_name_of_the_manifest_does_not_replace_it(tmp_path):
    """A user's callback may write any file into the logdir; these two stay on the machine."""

    def write():
        for name in ("manifest.json", "lease.json", "notes/manifest.json"):
            path = local_path(URL) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")

    train(URL, saving(URL), At(write, step=1))

    assert Store(URL).read("notes/manifest.json")[0] == b"mine" and "lease.json" not in objects(URL)
    assert objects(URL) == named(URL)


def test_a_log_that_the_user_deletes_is_deleted_in_the_store():
    """The store has the files of the folder."""
    path = local_path(URL) / "notes.txt"
    seen = []

    def act():
        if path.exists():
            deadline = time.monotonic() + 60
            while "notes.txt" not in objects(URL) and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append("notes.txt" in objects(URL))
            path.unlink()
        elif not seen:
            path.write_text("mine")

    train(URL, saving(URL, every_steps=1), At(act))

    assert seen == [True] and "notes.txt" not in objects(URL) == named(URL)


def test_loggers_and_checkpoints_may_have_different_urls():
    """Each is a logdir of its own."""
    train(URL, saving("memory://runs/checkpoints of mine"), num_epochs=1)

    assert "csv/train.csv" in objects(URL) and not any("checkpoints" in name for name in objects(URL))
    other = objects("memory://runs/checkpoints of mine")
    assert other == named("memory://runs/checkpoints of mine") and not any("csv" in name for name in other)


# ---- the store fails while a run trains


def test_training_continues_while_the_store_is_gone(faulty, tmp_path, monkeypatch, caplog):
    """For longer than a new store would be waited for; what was not uploaded is uploaded later."""
    monkeypatch.setattr(store, "FIRST_PATIENCE_S", 0.1)
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "patience_s", 0.1)
    steps = []

    def act():
        steps.append(time.monotonic())
        if len(steps) == 1:
            faulty.fail_times(10**9, TimeoutError("gone"))
        if len(steps) == 3 * NUM_STEPS:
            time.sleep(0.3)
            faulty.fail(lambda operation, path: None)

    train(FAULTY, saving(FAULTY), At(act), num_epochs=3)

    assert_equal_to_one_on_a_disk(FAULTY, tmp_path / "run", num_epochs=3)
    assert "TimeoutError: gone" in caplog.text
    assert max(late - early for early, late in itertools.pairwise(steps)) < 30


def test_a_store_that_stays_gone_ends_the_run_after_a_while(faulty, staging, monkeypatch):
    """The error names the folder with what was not uploaded, and a training error is not hidden."""
    impatient(monkeypatch, 0.3)
    gone = At(lambda: faulty.fail_times(10**9, TimeoutError("gone")), step=1)

    with pytest.raises(OSError, match=f"^{FAULTY}: uploads made no progress for 0.3 s; .*gone.*staging") as refused:
        train(FAULTY, saving(FAULTY), gone)

    folder = Path(str(refused.value).rpartition(" is in ")[2].partition("; the")[0])
    assert folder.parent == staging and load_checkpoint(folder / "checkpoints" / "last.pth")["counters"]

    faulty.reset()
    with pytest.raises(InterruptedError, match="stopped by the test") as stopped:
        train(FAULTY, saving(FAULTY), gone, At(stop, step=3), resume=None)
    assert "the logdir is not complete in the store" in stopped.value.__notes__[-1]


def test_staged_bytes_are_limited(faulty, monkeypatch, caplog):
    """Training waits when more would wait for their upload than allowed, and says so."""
    monkeypatch.setenv("RUNNERKIT_STAGED_GB", "0.000001")

    def fault(operation, path):
        if operation == "put" and "objects" in path:
            time.sleep(0.3)

    faulty.fail(fault)
    train(FAULTY, saving(FAULTY, every_steps=1), num_epochs=1)

    assert "waiting for uploads, since" in caplog.text and "RUNNERKIT_STAGED_GB is 1e-06" in caplog.text
    assert objects(FAULTY) == named(FAULTY)


def test_checkpoints_that_are_replaced_before_their_upload_do_not_fill_the_disk(faulty, staging):
    """While the store is gone, the outbox has the files of the newest checkpoints, not of all."""
    seen = []
    look = At(lambda: seen.append(len([*staging.glob("*/.outbox/*")])))
    gone = At(lambda: faulty.fail_times(10**9, TimeoutError("gone")), step=1)
    back = At(lambda: faulty.fail(lambda operation, path: None), step=8 * NUM_STEPS)
    train(FAULTY, saving(FAULTY, every_steps=1), gone, look, back, num_epochs=8)

    assert 4 <= max(seen) <= 14, (
        "files of two snapshots, of the last two checkpoints, the best and the index, and a log"
    )
    assert objects(FAULTY) == named(FAULTY)


def test_a_wrong_limit_is_named(monkeypatch):
    """Before the store is used."""
    monkeypatch.setenv("RUNNERKIT_STAGED_GB", "much")

    with pytest.raises(ValueError, match="RUNNERKIT_STAGED_GB must be a number of GB, got 'much'"):
        train(URL)

    assert objects(URL) == []


def test_a_store_that_lists_late_is_enough(faulty, tmp_path):
    """Runs read the manifest, never a listing."""
    faulty.hides_new = True
    train(tmp_path / "run", saving(tmp_path / "run"))

    with pytest.raises(InterruptedError):
        train(FAULTY, saving(FAULTY), At(stop, step=NUM_STEPS + 1))
    train(FAULTY, saving(FAULTY))

    assert differences(fingerprint(tmp_path / "run"), fingerprint(local_copy(FAULTY))) == []
    faulty.hides_new = False
    assert objects(FAULTY) == named(FAULTY)


def test_credentials_that_expire_before_the_first_upload_are_waited_for(faulty):
    """An epoch may take longer than they are valid."""
    expired = At(lambda: faulty.fail_times(5, PermissionError("ExpiredToken"), operation="put"), step=1)

    train(FAULTY, saving(FAULTY), expired, num_epochs=1)

    assert objects(FAULTY) == named(FAULTY)


def test_a_large_upload_is_progress(faulty, monkeypatch):
    """A file may take longer than the patience, if parts of it arrive."""
    impatient(monkeypatch, 1.0)
    whole = faulty.put_file

    def put_slowly(self, lpath, rpath, callback=None, **kwargs):
        if "objects" in rpath:
            for _ in range(12):
                time.sleep(0.1)
                if callback is not None:
                    callback.relative_update(1)
        whole(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(faulty, "put_file", put_slowly)

    train(FAULTY, saving(FAULTY, every_steps=None, save_best=False, save_last=False), num_epochs=1)

    assert objects(FAULTY) == named(FAULTY)


def test_a_run_that_was_taken_over_changes_nothing_anymore(url):
    """It raises at its next checkpoint; the other run's objects stay."""
    after = {}

    def take_over():
        claims.wait(local_path(url))  # nothing is being uploaded
        Store(url).write("lease.json", json.dumps({"run": "other", "holder": "process 7 on mars"}).encode())
        after.update({name: Store(url).read(name)[0] for name in objects(url)})

    with pytest.raises(LeaseLost, match="process 7 on mars"):
        train(url, saving(url, every_steps=None), At(take_over, step=2 * NUM_STEPS + 1), num_epochs=4)

    assert {name: Store(url).read(name)[0] for name in objects(url)} == after


def test_weights_and_runners_are_read_from_urls(tmp_path):
    """A model, a run from another, the weights of another, and one checkpoint of it."""
    train(URL, saving(URL), num_epochs=2)
    best, last = f"{URL}/checkpoints/best.pth", f"{URL}/checkpoints/last.pth"

    loaded = [dl.SupervisedRunner(mlp(seed=2, dropout=0.3)).load(source).model for source in (URL, Path(best))]
    assert torch.equal(*map(weights, loaded)) and not torch.equal(weights(loaded[0]), weights(mlp(seed=2)))
    with pytest.raises(FileNotFoundError, match=r"^memory://runs/mine/checkpoints/model.0009.pth: nothing is there"):
        dl.SupervisedRunner(mlp()).load(f"{URL}/checkpoints/model.0009.pth")

    runner = train("memory://runs/next", saving("memory://runs/next", resume_runner=URL), num_epochs=3, resume=None)
    assert runner.epoch_step == 3
    assert train("memory://runs/third", resume=last, num_epochs=3).epoch_step == 3
    tuned = train("memory://runs/tuned", saving("memory://runs/tuned", resume_model=URL), num_epochs=1, resume=None)
    assert tuned.epoch_step == 1
    assert url_of(local_copy(URL)) == URL
