"""Tests of `runnerkit doctor` on the files of real runs, intact and broken in many ways."""

import functools
import hashlib
import json
import os
import pickle
import shutil
import signal

import pytest
import torch

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint, save_checkpoint
from runnerkit.commands.cli import main
from runnerkit.storage.logdir_lock import lock
from tests.test_one_run_a_logdir import Holder
from tests.tiny import loader, train

MODEL = "model.0004.pth"


def train_in(logdir, **options):
    options = {"loggers": {"jsonl": dl.JSONLLogger(logdir)}, "hparams": {"lr": 0.1}, "num_epochs": 4, **options}
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    train(loaders=loaders, logdir=logdir, monitor="valid/loss", **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the logdir of a successful run, which keeps epochs 3 and 4."""
    logdir = tmp_path_factory.mktemp("whole") / "log"
    train_in(logdir)
    return logdir


@pytest.fixture
def logdir(whole, tmp_path):
    """Return a copy of the logdir, with its hard links, for a test to break."""
    shutil.copytree(whole, tmp_path / "log")
    for alias in ("last.pth", "best.pth"):
        path = tmp_path / "log" / "checkpoints" / alias
        path.unlink()
        os.link(path.with_name("model.0004.pth"), path)
    return tmp_path / "log"


@pytest.fixture
def examine(capsys):
    """Return a function that runs the command and returns (exit code, lines with one verdict, last line)."""

    def call(logdir, verdict="BROKEN"):
        code = main(["doctor", str(logdir)])
        *lines, last = capsys.readouterr().out.splitlines()
        return code, [line.removeprefix(verdict).strip() for line in lines if line.startswith(verdict)], last

    return call


def sorted_events(logdir, key="train"):
    return sorted((logdir / "tensorboard" / key).glob("*tfevents*"))


def test_a_run_that_went_well_is_good(whole, examine):
    """An intact logdir gets one line per checkpoint, alias and log and one for the checkpoint to resume from."""
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}

    code, good, last = examine(whole, "good")

    size = (whole / "checkpoints" / "model.0004.pth").stat().st_size
    assert code == 0 and last == f"{whole}: all is good"
    assert [line for line in good if "tfevents" not in line] == [
        "checkpoints/index.json: lists 2 checkpoints",
        good[1],
        f"checkpoints/model.0004.pth: epoch 4, step 16, {size} bytes",
        *(f"checkpoints/{alias}.pth: is model.0004.pth" for alias in ("last", "best")),
        "checkpoints: resuming would start from model.0004.pth",
        *(f"{file}: can be read" for file in ("hparams.yml", "environment.json", "status.json")),
        *(f"{file}s in order" for file in ("csv/train.csv: row", "csv/valid.csv: row", "metrics.jsonl: line")),
    ]
    assert sum("tfevents" in line and "events in order" in line for line in good) == 3  # and hyperparameters
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


def change(path, at, new):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def edit_index(folder, **fields):
    content = json.loads((folder / "index.json").read_text())
    content["checkpoints"][-1] |= fields
    (folder / "index.json").write_text(json.dumps(content))


def replace_with(folder, save):
    """Replace the last checkpoint with another file and update its size and checksum in the index."""
    path = folder / MODEL
    path.unlink()
    save(path)
    edit_index(folder, size_bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def of_a_newer_format(folder):
    state = {**load_checkpoint(folder / MODEL), "format_version": 9}
    replace_with(folder, functools.partial(save_checkpoint, state))


LAST = "checkpoints/model.0004.pth: "
ALIASES = [f"checkpoints/{alias}.pth: is model.0004.pth, which is broken" for alias in ("last", "best")]
NONE_WHOLE = [f"checkpoints/{alias}.pth: is not an intact checkpoint of index.json" for alias in ("last", "best")]
UNREADABLE = ["checkpoints/index.json: cannot be read (", *NONE_WHOLE]
NINE = "is damaged: it has 9 bytes instead of"
CHECKPOINTS = {
    "truncated": (cut(MODEL, 100), [LAST + "is damaged: it has 100 bytes instead of", *ALIASES]),
    "empty": (cut(MODEL, 0), [LAST + "is damaged: it has 0 bytes instead of", *ALIASES]),
    "a flipped bit": (lambda folder: change(folder / MODEL, 999, b"\xff"), [LAST + "is damaged: the chec", *ALIASES]),
    "missing": (remove(MODEL), [LAST + "is missing"]),
    "missing, with its names": (remove(MODEL, "last.pth"), [LAST + "is missing"]),
    "malicious": (lambda folder: replace_with(folder, lambda path: path.write_bytes(pickle.dumps(Malicious(), 2))),
                  [LAST + "is not a complete checkpoint of tensors and plain values", *NONE_WHOLE]),
    "of a newer format": (of_a_newer_format, [LAST + "has format 9, written by runnerkit", *NONE_WHOLE]),
    "index torn": (cut("index.json", 50), UNREADABLE),
    "index of a newer format": (lambda folder: (folder / "index.json").write_text('{"format_version": 2}'), UNREADABLE),
    "index with other fields": (lambda folder: edit_index(folder, other=1), UNREADABLE),
    "index gone": (remove("index.json"), ["checkpoints/index.json: does not list the checkpoints in t", *NONE_WHOLE]),
    "last torn, a copy": (lambda folder: ((folder / "last.pth").unlink(), (folder / "last.pth").write_bytes(b"to")),
                          NONE_WHOLE[:1]),
    "all of them": (lambda folder: [os.truncate(path, 9) for path in folder.glob("model.*")],
                    [f"checkpoints/model.0003.pth: {NINE}", LAST + NINE, *ALIASES,
                     "checkpoints: nothing to resume from: every checkpoint of the full state is broken"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_broken_checkpoint_is_named_with_what_is_wrong(logdir, examine, name, monkeypatch, tmp_path):
    """A broken checkpoint and its aliases are reported with exit code 1, and no code in them runs."""
    monkeypatch.chdir(tmp_path)
    spoil, expected = CHECKPOINTS[name]
    spoil(logdir / "checkpoints")

    code, broken, last = examine(logdir)

    assert code == 1 and last == f"{logdir}: {len(broken)} findings are BROKEN"
    assert [line[: len(words)] for line, words in zip(broken, expected, strict=True)] == expected
    assert not (tmp_path / "executed").exists()


def test_what_a_killed_run_leaves_is_noted_and_is_no_fault(logdir, examine):
    """Temporary files, unlisted checkpoints, outdated aliases and stale locks are notes, because a run handles them."""
    folder = logdir / "checkpoints"
    (folder / ".model.0005.pth.123.tmp").write_bytes(b"ha")
    shutil.copy(folder / "model.0004.pth", folder / "model.0005.pth")
    (folder / "last.pth").unlink()
    os.link(folder / "model.0003.pth", folder / "last.pth")
    pid = os.fork()
    if pid == 0:
        lock(logdir)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)

    code, notes, last = examine(logdir, "note")

    assert code == 0 and last.endswith("all is good")
    assert notes[0].startswith(".lock: left by a killed run, process ")
    assert notes[0].endswith("; it does not block other runs")
    assert notes[1:] == [
        "checkpoints/last.pth: is model.0003.pth, not yet model.0004.pth: the next save updates it",
        "checkpoints/.model.0005.pth.123.tmp: incomplete file of a killed run: delete it",
        "checkpoints/model.0005.pth: not in index.json, left by a killed run: delete it",
    ]


def test_a_name_that_outlives_its_checkpoint_is_told_of(logdir, examine):
    """A checkpoint that was deleted but survives as the hard link `last.pth` is reported, with the fix."""
    (logdir / "checkpoints" / "model.0004.pth").unlink()

    assert examine(logdir, "note")[1] == [
        f"checkpoints/{alias}.pth: is an intact model.0004.pth: copy it to that name" for alias in ("last", "best")
    ]
    shutil.copy(logdir / "checkpoints" / "last.pth", logdir / "checkpoints" / "model.0004.pth")
    assert examine(logdir)[0] == 0


def test_an_evaluation_of_training_data_may_leave_out_epochs(logdir, examine):
    """Only the loader `train` runs in every epoch, not another one whose key ends so."""
    (logdir / "csv" / "valid").mkdir()
    (logdir / "csv" / "valid" / "train.csv").write_text("stage,epoch,step,loss\ntrain,2,8,0.5\ntrain,4,16,0.4\n")

    assert examine(logdir) == (0, [], f"{logdir}: all is good")


def test_a_logdir_with_json_lines_only_is_checked(whole, tmp_path, examine):
    """The JSONL logger may be the only one of a run without checkpoints."""
    shutil.copy(whole / "metrics.jsonl", tmp_path)

    assert examine(tmp_path, "good") == (0, ["metrics.jsonl: lines in order"], f"{tmp_path}: all is good")


def test_a_run_under_way_is_reported(logdir, examine):
    """With its process id."""
    holder = Holder(logdir)

    code, notes, _ = examine(logdir, "note")

    holder.kill()
    assert code == 0 and notes[0].startswith(f".lock: a run is writing here, process {holder.pid} on ")


def append(name, text):
    return lambda logdir: (logdir / name).write_text((logdir / name).read_text() + text)


def repeat_events(logdir):
    path = sorted_events(logdir)[0]
    shutil.copy(path, path.with_name(path.name + ".1"))


def repeat_line(logdir):
    path = logdir / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")


APPENDED = {
    "row torn": ("csv/train.csv", "train,5", "line 6 has 2 of 5 cells, incomplete: resuming drops it"),
    "row twice": ("csv/valid.csv", "train,4,16,0.5\n", "line 6: row is logged twice at epoch 4"),
    "row back": ("csv/valid.csv", "train,2,8,0.5\n", "line 6: goes back to epoch 2, step 8 from epoch 4, step 16"),
    "epochs missing": ("csv/train.csv", "train,7,28,0.5,0.5\n", "line 6: epoch 7 follows epoch 4: the"),
    "no number": ("csv/valid.csv", "train,5,20,low\n", "line 6 has a cell that is not a number: could"),
    "zeros": ("csv/train.csv", "\0" * 5 + '"', ""),
    "line torn": ("metrics.jsonl", '{"scope":', "is truncated or damaged after "),
}
LOGS = {
    **{name: (append(file, text), [f"{file}: {words}"]) for name, (file, text, words) in APPENDED.items()},
    "many": (append("csv/valid.csv", "x\n" * 9),
             [*(f"csv/valid.csv: line {number} has 1 of" for number in (6, 7, 8)), "csv/valid.csv: and 6 more"]),
    "emptied": (cut("csv/train.csv", 0), ["csv/train.csv: its header must be stage,epoch,step and unique metric nam"]),
    "line twice": (repeat_line, ["metrics.jsonl: metric loss of loader valid is logged twice at epoch 4, step 16"]),
    "hparams": (lambda logdir: (logdir / "hparams.yml").write_text("a: [1"), ["hparams.yml: cannot be read: while"]),
    "environment": (cut("environment.json", 9), ["environment.json: cannot be read: "]),
    "events torn": (lambda logdir: os.truncate(sorted_events(logdir)[0], 200),
                    ["tensorboard/train/events: is truncated or damaged after "]),
    "events flipped": (lambda logdir: change(sorted_events(logdir)[0], 150, b"\xff"),
                       ["tensorboard/train/events: is truncated or damaged after "]),
    "events twice": (repeat_events, ["tensorboard/train/events: goes back to epoch 1, step 4 from epoch 4, step 16"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_a_broken_log_is_named_with_what_is_wrong(logdir, examine, name):
    """Truncated, damaged, unordered and duplicate log entries are reported; only the first few of each file."""
    spoil, expected = LOGS[name]
    spoil(logdir)

    code, broken, _ = examine(logdir)

    broken = [line.replace(path.name, "events") for line in broken for path in [sorted_events(logdir)[-1]]]
    assert code == 1
    assert [line[: len(words)] for line, words in zip(broken, expected, strict=True)] == expected


def test_shards_are_verified_one_by_one(tmp_path, examine):
    """Missing, corrupt and truncated files of a sharded checkpoint are named, and `last` counts as broken."""
    engine = dl.FullyShardedDataParallelEngine(1, device="cpu", sharded_checkpoints=True)
    train_in(tmp_path, engine=engine)
    folder = tmp_path / "checkpoints" / "model.0004"
    whole = examine(tmp_path), examine(tmp_path, "good")[1]
    shard = next(path for path in folder.iterdir() if path.suffix == ".distcp")

    found = []
    padding = (folder / "rest.pth").read_bytes().index(b"ZZZ")
    changes = [lambda: change(folder / "rest.pth", padding, b"\xff"), lambda: change(shard, 99, b"\xff")]
    losses = [shard.unlink, (folder / ".metadata").unlink, lambda: os.truncate(folder / "rest.pth", 100)]
    for spoil in changes + losses:
        spoil()
        found.append(examine(tmp_path)[1])

    assert whole[0][:2] == (0, [])
    assert "checkpoints/last: is model.0004" in whole[1]
    faults = ["the checksum of rest.pth is wrong", f"the checksum of shard {shard.name} is wrong"]
    expected = [f"checkpoints/model.0004: is damaged: {fault}" for fault in (*faults, f"shard {shard.name} is missing")]
    assert [lines[0] for lines in found[:3]] == expected
    assert found[3][0].endswith(" is missing")
    assert ": is damaged: rest.pth is not a complete checkpoint of tensors and plain values" in found[4][0]
    assert found[0][1] == "checkpoints/last: is model.0004, which is broken"


@pytest.mark.parametrize("make", [False, True])
def test_what_is_no_logdir_is_a_wrong_use(tmp_path, capsys, make):
    """A folder without a run, a missing folder and a missing argument give exit code 2 and a message."""
    if make:
        (tmp_path / "log").mkdir()

    assert main(["doctor", str(tmp_path / "log")]) == 2
    assert "runnerkit doctor: " in capsys.readouterr().err
    assert main(["doctor"]) == 2


def test_a_resumed_run_mends_what_the_doctor_said_it_would(logdir, examine):
    """A resumed run trims truncated logs, skips a damaged last checkpoint and writes a new one."""
    os.truncate(logdir / "checkpoints" / "model.0004.pth", 100)
    append("csv/train.csv", "train,5")(logdir)
    os.truncate(sorted_events(logdir)[0], sorted_events(logdir)[0].stat().st_size - 5)
    assert examine(logdir)[0] == 1

    train_in(logdir, resume="auto")

    assert examine(logdir)[:2] == (0, [])
    assert torch.load(logdir / "checkpoints" / "last.pth", weights_only=True)["counters"]["epoch_step"] == 4
