"""With full, broken or read-only disks and damaged files, a complete checkpoint is kept and found."""

import errno
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint, save_checkpoint
from runnerkit.checkpoints.folder import CheckpointFolder, find_checkpoint
from runnerkit.checkpoints.store import clean_up
from runnerkit.logger import Step
from runnerkit.storage.atomic_file import write_text
from runnerkit.storage.checksum import sha256_of
from tests.faults.kills import die_at, exit_code_of
from tests.storage.stored_runs import At
from tests.tiny import loader, train


def state(epoch):
    """Return a checkpoint with the parts that a checkpoint folder reads."""
    counters = {"epoch_step": epoch, "batch_step": 10 * epoch, "epoch_metrics": {"valid": {"loss": 1.0 / epoch}}}
    return {"format_version": 1, "counters": counters, "weight": torch.full((1000,), float(epoch))}


def add(folder, epoch, *, sharded=False, num_kept=2):
    """Save as the callback does: the file, the index, further names, and then the deletion of old files."""
    checkpoints = CheckpointFolder(folder)
    name, saved = f"model.{epoch:04d}", state(epoch)
    if sharded:
        shard = checkpoints.temporary(name) / "__0_0.distcp"
        shard.parent.mkdir()
        shard.write_bytes(b"shard" * epoch)
        saved["shards"] = {"places": {}, "files": {shard.name: sha256_of(shard)}, "size_bytes": shard.stat().st_size}
    else:
        name += ".pth"
    record = checkpoints.add(name, saved, kind="runner", epoch=epoch, batch=10 * epoch, score=None, metrics={})
    checkpoints.set_alias("last", record)
    checkpoints.set_alias("best", record)
    checkpoints.keep(checkpoints.records[-num_kept:])


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints."""
    for epoch in (1, 2):
        add(tmp_path / "checkpoints", epoch)
    return tmp_path / "checkpoints"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_whole(folder, *, epochs=(1, 2)):
    """Check that every indexed file is complete and that no partial files are left."""
    records = CheckpointFolder(folder).records
    assert [record.epoch for record in records] == list(epochs)
    for record in records:
        saved = load_checkpoint(folder / record.name, whole=False)
        assert torch.equal(saved["weight"], state(record.epoch)["weight"])
    assert half_files(folder) == []
    assert find_checkpoint(folder).name == records[-1].name


def half_files(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def fit(logdir, **options):
    """Train a small model for two epochs, or for those that are left."""
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    return train(loaders=loaders, logdir=logdir, **{"num_epochs": 2, **options})


# A disk without room.


@pytest.fixture
def small_disk(tmp_path):
    """Yield a tmpfs of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting takes root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_checkpoints_before_and_says_so(small_disk):
    """The error has the path and the free space."""
    for epoch in (1, 2):
        add(small_disk, epoch)
    fill(small_disk, free=40_960)

    for size in (300_000, 10_000):  # one tensor: the disk is full before or just after its end
        with pytest.raises(OSError, match=r"model.0003.pth: No space left .* MB of 1.0 MB are free there") as full:
            save_checkpoint({"weight": torch.zeros(size)}, small_disk / "model.0003.pth")
        assert str(full.value).startswith(f"[Errno {errno.ENOSPC}] cannot write {small_disk}")
        assert_whole(small_disk)


def fill(disk, *, free):
    (disk / "other data").write_bytes(b"." * (shutil.disk_usage(disk).free - free))


def test_a_run_on_a_full_disk_ends_with_the_epoch_before(small_disk):
    """It resumes when there is space again."""

    class Fill(dl.Callback):
        def on_epoch_start(self, runner):
            if runner.epoch_step == 2:
                fill(small_disk, free=8192)

    with pytest.raises(OSError, match=r"cannot write .*No space left on device"):
        fit(small_disk, callbacks=[Fill()])
    (small_disk / "other data").unlink()

    assert fit(small_disk, resume="auto").epoch_step == 2
    assert half_files(small_disk / "checkpoints") == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
@pytest.mark.parametrize("logger", [dl.CSVLogger, dl.TensorboardLogger, dl.JSONLLogger])
@pytest.mark.parametrize("is_begun", [True, False], ids=["", "before the first row"])
def test_a_log_on_a_full_disk_says_which_and_what_room_there_is(small_disk, logger, is_begun):
    """The error is like that of a checkpoint."""
    mine = logger(small_disk)
    mine.setup()

    def log(epoch):
        mine.log_scalars({"loss": 0.5}, step=Step("train", "valid", epoch=epoch, batch=epoch), scope="loader")
        mine.flush()

    if is_begun:
        log(1)
    fill(small_disk, free=0)
    words = rf"cannot write {small_disk}/.*: No space left on device; 0.0 MB of 1.0 MB are free there"
    try:
        with pytest.raises(OSError, match=words):  # a page may have room for a few more
            deque(map(log, range(2, 2000)))
    finally:
        with suppress(OSError):
            mine.close()


class Large(Dataset):
    """A data set with samples of 1 MB."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(250_000), torch.tensor(0)


def test_a_shortage_of_shared_memory_says_where_and_what_needs_less(tmp_path):
    """The test mounts a private /dev/shm of 4 MB."""
    code = """
        from torch import nn
        from torch.utils.data import DataLoader
        from tests.faults.test_storage import Large
        from tests.tiny import train
        train(nn.Linear(250_000, 3), loaders={"train": DataLoader(Large(), batch_size=8, num_workers=2)})
        """
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting takes root")

    command = [*mount, sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert ended.returncode == 1
    assert "no room in /dev/shm, through which workers send batches: " in ended.stderr
    assert "MB of 4.2 MB are free there now; this loader keeps up to 2 x 2 batches there" in ended.stderr


class Delete(dl.Callback):
    """A callback that deletes the logdir in the second epoch, as a user may when cleaning up."""

    def __init__(self, logdir):
        super().__init__(dl.CallbackOrder.External)
        self.logdir = logdir

    def on_epoch_start(self, runner):
        if runner.epoch_step == 2 and runner.engine.is_main_process:
            shutil.rmtree(self.logdir)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loggers": {"csv": None, "tensorboard": None}},
        {"loggers": {"csv": None}, "hparams": {"lr": 0.1}},
        {"num_processes": 2},
    ],
    ids=["all", "checkpoints", "tensorboard", "two processes"],
)
def test_a_logdir_that_is_deleted_during_the_run_ends_it_and_is_not_made_again(tmp_path, options):
    """A folder with only the last epochs would look like a complete run."""
    logdir = tmp_path / "log"
    with pytest.raises(OSError, match=rf"cannot write to {logdir}.*: it was deleted during the run; start"):
        fit(logdir, num_epochs=3, callbacks=[Delete(logdir)], **options)

    assert not logdir.exists()


def test_a_limit_on_the_size_of_files_is_a_full_disk(folder):
    """Such a limit may be a quota or RLIMIT_FSIZE."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write .*big.pth: File too large; .* MB are free"):
            save_checkpoint({"weight": torch.zeros(100_000)}, folder / "big.pth")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_whole(folder)


# A disk that fails, at each of its operations.


def num_calls(folder, monkeypatch, name):
    """Return how often a save calls an operation."""
    calls, function = [], getattr(os, name)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, lambda *args, **kwargs: calls.append(args) or function(*args, **kwargs))
        add(folder, 3)
    return len(calls)


@pytest.mark.parametrize("name", ["fsync", "replace", "open", "link"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_an_error_of_the_disk_at_any_operation_leaves_a_whole_checkpoint(tmp_path, folder, monkeypatch, name, number):
    """The error is named, no partial files are left, and the next save works again."""
    shutil.copytree(folder, tmp_path / "counted")
    count, function = num_calls(tmp_path / "counted", monkeypatch, name), getattr(os, name)
    assert count
    for fatal in range(count):
        broken, left = tmp_path / f"{name} {fatal}", [fatal]
        shutil.copytree(folder, broken)

        def fail(*args, left=left, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
            return function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            if name == "link":  # a disk without hard links: the file is copied instead
                add(broken, 3)
            else:
                with pytest.raises(OSError, match="cannot write") as failed:
                    add(broken, 3)
                assert failed.value.errno == number

        assert half_files(broken) == []
        assert load_checkpoint(find_checkpoint(broken))["counters"]["epoch_step"] in (2, 3)
        add(broken, 3)
        assert_whole(broken, epochs=(2, 3))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP], ids=["CIFS", "9p"])
def test_a_file_system_that_cannot_sync_a_folder_is_written_to_all_the_same(tmp_path, monkeypatch, number):
    """The file already has its name by then; an error while syncing a file itself still counts."""
    fsync, refuses_files = os.fsync, []

    def picky(descriptor):
        if refuses_files or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", picky)

    add(tmp_path, 1)
    add(tmp_path, 2, sharded=True)

    assert_whole(tmp_path)
    refuses_files.append(True)
    with pytest.raises(OSError, match=r"cannot write .*model.0003.pth"):
        add(tmp_path, 3)


def test_a_folder_that_may_be_written_to_but_not_listed_is_written_to(tmp_path, monkeypatch):
    """It cannot be opened for a sync; root can open any folder, so the error is simulated."""
    real = os.open

    def refusing(path, *args, **kwargs):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)

    write_text(tmp_path / "file", "new")

    assert (tmp_path / "file").read_text() == "new"


# A kill between any two operations.


def killed_at_each_operation(start, act):
    """Yield copies of a folder after `act` on them was killed at its first change of the disk, at its second, ..."""
    for operation in count():
        broken = start.with_name(f"killed at {operation}")
        shutil.copytree(start, broken, symlinks=True)
        code = exit_code_of(lambda operation=operation, broken=broken: (die_at(operation), act(broken)))
        assert code in (0, 9)
        yield broken
        if code == 0:
            return


@pytest.mark.parametrize("sharded", [False, True], ids=["a file", "a folder of shards"])
@pytest.mark.parametrize("before", [0, 3], ids=["the first", "the fourth"])
def test_a_kill_between_any_two_operations_of_a_save_loses_nothing(tmp_path, before, sharded):
    """A complete checkpoint is found, and the next run deletes partial files and resumes."""
    start = tmp_path / "start"
    start.mkdir()
    for epoch in range(1, before + 1):
        add(start, epoch, sharded=sharded)
    names = {f"model.{before + 1:04d}", f"model.{before + 2:04d}", "last", "best"}
    expected = {"index.json", *(names if sharded else {f"{name}.pth" for name in names})}

    folders = [*killed_at_each_operation(start, lambda folder: add(folder, before + 1, sharded=sharded))]

    assert len(folders) > 8
    for broken in folders:
        source = find_checkpoint(broken) if before else None
        if before:
            assert load_checkpoint(source, whole=False)["counters"]["epoch_step"] in (before, before + 1)
        clean_up(CheckpointFolder(broken), resumed_from=source)
        assert half_files(broken) == []
        for epoch in (before + 1, before + 2):
            add(broken, epoch, sharded=sharded)
        assert_whole(broken, epochs=(before + 1, before + 2))
        assert {path.name for path in broken.iterdir()} == expected


# What cannot be written to.


def test_a_logdir_that_cannot_be_written_to_ends_the_run_before_it_trains(tmp_path):
    """A folder cannot be created below a file or in /proc; the error has the path."""
    (tmp_path / "file").touch()
    steps = []
    count_steps = At(lambda: steps.append(1))

    for place in (tmp_path / "file" / "log", Path("/proc/log")):
        checkpoint = dl.CheckpointCallback(place, content="runner")
        with pytest.raises(OSError, match=f"cannot write to logdir {place}: "):
            fit(None, callbacks=[checkpoint, count_steps])
    assert steps == []


def test_a_disk_that_is_read_only_is_named(small_disk):
    """The disk was writable when the earlier checkpoints were written."""
    add(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    with pytest.raises(OSError, match=r"cannot write .*disk: .*[Rr]ead-only file system") as read_only:
        CheckpointFolder(small_disk).make()
    assert read_only.value.errno == errno.EROFS
    assert_whole(small_disk, epochs=(1,))


# Files that were damaged.


class Malicious:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def damage(path, how, marker):
    data = path.read_bytes()
    middle = len(data) // 2
    if how == "pickled":
        path.write_bytes(pickle.dumps(Malicious(marker)))
    elif how == "pickled by torch":
        torch.save({"counters": Malicious(marker)}, path)
    else:
        flipped = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
        path.write_bytes({"torn": data[:middle], "flipped": flipped, "empty": b""}[how])


@pytest.mark.parametrize("how", ["torn", "flipped", "empty", "pickled", "pickled by torch"])
@pytest.mark.parametrize("is_in_index", [False, True], ids=["", "as the index says"])
def test_a_damaged_checkpoint_is_passed_over_and_not_run(folder, tmp_path, caplog, how, is_in_index):
    """The previous one is used, and a warning names the damaged one, even if its index entry was forged."""
    damage(folder / "model.0002.pth", how, tmp_path / "marker")
    if is_in_index and how.startswith("pickled"):
        index = json.loads((folder / "index.json").read_text())
        data = (folder / "model.0002.pth").read_bytes()
        index["checkpoints"][1] |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (folder / "index.json").write_text(json.dumps(index))

    assert find_checkpoint(folder.parent) == folder / "model.0001.pth"
    fault = "holds posix.mkdir, which is not loaded" if how == "pickled by torch" else "is not a complete checkpoint of"
    passed_over = fault if is_in_index and how.startswith("pickled") else "is damaged: "
    assert f"model.0002.pth {passed_over}" in caplog.text
    with pytest.raises(ValueError, match=f"model.0002.pth {fault}"):
        load_checkpoint(folder / "model.0002.pth")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("damaged", ["flipped", "gone", "elsewhere"])
def test_a_damaged_shard_is_passed_over(tmp_path, caplog, damaged):
    """This includes a shard listed at a path elsewhere, which is not read."""
    for epoch in (1, 2):
        add(tmp_path, epoch, sharded=True)
    shard, rest = tmp_path / "model.0002" / "__0_0.distcp", tmp_path / "model.0002" / "rest.pth"
    if damaged == "elsewhere":
        saved = load_checkpoint(rest)
        saved["shards"]["files"] = {"/dev/zero": ""}  # reading it would never end
        save_checkpoint(saved, rest)
        index = json.loads((tmp_path / "index.json").read_text())
        size = rest.stat().st_size + shard.stat().st_size
        index["checkpoints"][1] |= {"size_bytes": size, "sha256": sha256_of(rest)}
        (tmp_path / "index.json").write_text(json.dumps(index))
    elif damaged == "flipped":
        damage(shard, damaged, None)
    else:
        shard.unlink()

    assert find_checkpoint(tmp_path) == tmp_path / "model.0001"
    assert "model.0002 is damaged" in caplog.text


def test_bits_flipped_anywhere_are_noticed_without_the_index_too(tmp_path):
    """A file requested by name is either loaded as it was saved or refused with a ValueError."""
    path, chance = save_checkpoint(state(1), tmp_path / "a.pth"), random.Random(0)
    data = path.read_bytes()
    for _ in range(300):
        place = chance.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :])
        with suppress(ValueError):
            found, expected = load_checkpoint(path), state(1)
            assert torch.equal(found.pop("weight"), expected.pop("weight")) and found == expected


def test_a_run_goes_on_from_the_one_before_and_sets_the_damaged_one_aside(tmp_path):
    """The damaged one does not count as one of the checkpoints to keep."""
    fit(tmp_path, num_epochs=3)
    damage(tmp_path / "checkpoints" / "model.0003.pth", "flipped", None)

    fit(tmp_path, num_epochs=4, resume="auto")

    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert {"model.0003.pth", "model.0004.pth", "model.0003.pth.damaged"} <= names
    for name in ("model.0003.pth", "model.0004.pth"):
        load_checkpoint(tmp_path / "checkpoints" / name)


@pytest.mark.parametrize("damaged", ["torn", "flipped"])
def test_a_damaged_newest_one_does_not_push_out_a_good_one(folder, damaged):
    """Otherwise the damaged one would be one of the two that are kept."""
    damage(folder / "model.0002.pth", damaged, None)

    source = find_checkpoint(folder)
    clean_up(CheckpointFolder(folder), resumed_from=source)
    add(folder, 3)

    assert_whole(folder, epochs=(1, 3))


# An index that was damaged.


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format_version": 1, "checkpoints": [{}]}', '{"format_version": 1}', "[" * 100_000, "\0"],
    ids=["empty", "torn", "a list", "null", "an empty record", "no records", "nested", "zeros"],
)
def test_without_its_index_a_folder_is_read_from_its_files(folder, caplog, text):
    """A warning says so, and damaged files are skipped."""
    add(folder, 3)
    damage(folder / "model.0003.pth", "flipped", None)
    (folder / "index.json").write_text(text)

    assert find_checkpoint(folder) == folder / "model.0002.pth"

    assert "index.json is damaged" in caplog.text
    checkpoints = CheckpointFolder(folder)
    clean_up(checkpoints, resumed_from=folder / "model.0002.pth")
    assert [record.name for record in checkpoints.records] == ["model.0002.pth"]
    assert json.loads((folder / "index.json").read_text())["checkpoints"][0]["batch"] == 20


def test_an_index_cannot_make_a_run_delete_what_is_elsewhere(folder, tmp_path):
    """Names in the index must be names of files in this folder."""
    victim = tmp_path / "victim"
    victim.touch()
    for name in ("../victim", str(victim), ".", "..", ""):
        index = json.loads((folder / "index.json").read_text())
        index["checkpoints"][0]["name"] = name
        (folder / "index.json").write_text(json.dumps(index))

        add(folder, 3)

        assert victim.exists()


def test_an_index_of_a_newer_version_is_refused_and_left_alone(folder):
    """This version cannot interpret it and must not overwrite it."""
    (folder / "index.json").write_text('{"format_version": 2}')
    before = content(folder)

    with pytest.raises(ValueError, match=r"index.json was written by a newer runnerkit than this, .*: upgrade it"):
        find_checkpoint(folder)
    assert content(folder) == before


# Other places, and other times.


def test_nothing_goes_through_another_file_system(tmp_path, monkeypatch):
    """A file is written in the same folder: one in TMPDIR would have to be copied over a live checkpoint."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing can be made here")
    monkeypatch.setenv("TMPDIR", "/proc/nothing can be made here")
    places, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: places.append(paths) or replace(*paths))

    fit(tmp_path)

    assert len(places) > 4
    assert all(Path(source).parent == Path(target).parent for source, target in places)


def test_a_clock_that_is_set_back_changes_nothing(tmp_path, monkeypatch, caplog):
    """It affects neither the newest checkpoint, nor the time of the next one, nor the logs."""
    fit(tmp_path / "expected", num_epochs=4)
    fit(tmp_path / "log", num_epochs=2)
    for path in (tmp_path / "log" / "checkpoints").iterdir():
        os.utime(path, (4e9, 4e9))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 1e7)

    every_minute = dl.CheckpointCallback(tmp_path / "log", content="runner", every_minutes=1)
    resumed = fit(tmp_path / "log", num_epochs=4, resume="auto", callbacks=[every_minute])

    assert resumed.epoch_step == 4
    assert find_checkpoint(tmp_path / "log").name == "model.0004.pth"
    assert not [path for path in (tmp_path / "log" / "checkpoints").iterdir() if path.name.count(".") == 3]
    for key in ("train", "valid"):
        expected = (tmp_path / "expected" / "csv" / f"{key}.csv").read_text()
        assert (tmp_path / "log" / "csv" / f"{key}.csv").read_text() == expected
