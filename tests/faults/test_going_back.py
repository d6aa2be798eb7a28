"""A run that returned to an earlier checkpoint and was killed resumes from there, not from the abandoned branch."""

import csv
import math
import os
import shutil
import signal

import pytest
import torch

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.folder import CheckpointFolder, find_checkpoint
from runnerkit.checkpoints.index import place_of
from runnerkit.checkpoints.store import clean_up, set_branch_aside
from runnerkit.commands.doctor import examine
from tests.faults.kills import Send, exit_code_of
from tests.faults.test_storage import add, killed_at_each_operation
from tests.tiny import loader, mlp, train, weights

NUM_EPOCHS, NUM_STEPS = 5, 4  # steps per epoch


def fit(logdir, *, resume=None, callbacks=()):
    """Train and keep every checkpoint; the "best" is the one with the largest loss, which is the first."""
    loaders = {"train": loader(16, 4, shuffle=True), "valid": loader(8, 4)}
    every = dl.CheckpointCallback(
        logdir, monitor="valid/loss", mode="max", content="runner", keep_best=50, every_steps=3
    )
    options = {"loaders": loaders, "callbacks": [every, *callbacks], "num_epochs": NUM_EPOCHS}
    return train(mlp(dropout=0.3), logdir=logdir, resume=resume, **options)


def names(logdir):
    return [record.name for record in CheckpointFolder(logdir / "checkpoints").records]


def epochs_in_csv(logdir):
    with (logdir / "csv" / "train.csv").open() as file:
        return [int(row["epoch"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the read-only folder of a run through all epochs, with a checkpoint of each."""
    logdir = tmp_path_factory.mktemp("going_back") / "whole"
    return logdir, fit(logdir)


@pytest.fixture
def logdir(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "log")
    return tmp_path / "log"


@pytest.mark.parametrize(
    ("source", "name", "step"),
    [
        ("model.0002.pth", "model.0002.pth", 8),
        ("model.0005.00000018.pth", "model.0005.00000018.pth", 18),
        ("best.pth", "model.0001.pth", 4),
    ],
    ids=["an epoch's end", "within an epoch", "the best"],
)
def test_auto_goes_on_from_where_a_killed_run_had_gone_back_to(whole, logdir, source, name, step):
    """All epochs are logged once; the abandoned branch is neither newest nor best, and its files are kept."""
    folder = logdir / "checkpoints"
    left = [each for each in names(logdir) if place_of(each) > place_of(name)]

    kill = Send(signal.SIGKILL, step=step + 1)
    assert exit_code_of(lambda: fit(logdir, resume=folder / source, callbacks=[kill])) == -signal.SIGKILL

    assert left and not set(left) & set(names(logdir))
    assert all((folder / f"{each}.abandoned").is_file() for each in left)
    assert find_checkpoint(logdir).name == name
    assert (folder / "last.pth").samefile(folder / name)
    assert (folder / "best.pth").samefile(folder / "model.0001.pth")
    assert examine(logdir).num_broken == 0
    assert_goes_on(whole, logdir)


def assert_goes_on(whole, logdir):
    """Check that the run resumes as if the abandoned branch had never existed."""
    resumed = fit(logdir, resume="auto")
    assert torch.equal(weights(resumed.model), weights(whole[1].model))
    assert epochs_in_csv(logdir) == [1, 2, 3, 4, 5]
    assert {place_of(name)[0] for name in names(logdir)} == {1, 2, 3, 4, 5}
    assert not list((logdir / "checkpoints").glob("*.damaged"))
    assert examine(logdir).num_broken == 0


def test_a_kill_between_a_new_file_and_the_index_calls_nothing_damaged(whole, logdir, monkeypatch):
    """The file has the name of one from the abandoned branch, but other contents."""
    num_writes, write = [0], CheckpointFolder._write_index

    def die(folder):
        num_writes[0] += 1
        if num_writes[0] == 2:  # the first write records the abandoned branch
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder)

    monkeypatch.setattr(CheckpointFolder, "_write_index", die)
    source = logdir / "checkpoints" / "model.0002.pth"
    assert exit_code_of(lambda: fit(logdir, resume=source)) == -signal.SIGKILL
    monkeypatch.undo()

    assert names(logdir)[-1] == "model.0002.pth" and (logdir / "checkpoints" / "model.0003.00000009.pth").is_file()
    assert_goes_on(whole, logdir)


def test_a_kill_between_the_index_and_the_names_leaves_no_old_name(tmp_path, monkeypatch):
    """This includes the last save, after which the resumed run has nothing left to do."""
    point = CheckpointFolder.set_alias

    def die(folder, alias, record):
        if record.name == f"model.{NUM_EPOCHS:04d}.pth":
            os.kill(os.getpid(), signal.SIGKILL)
        point(folder, alias, record)

    monkeypatch.setattr(CheckpointFolder, "set_alias", die)
    assert exit_code_of(lambda: fit(tmp_path)) == -signal.SIGKILL
    monkeypatch.undo()
    folder = tmp_path / "checkpoints"
    assert names(tmp_path)[-1] == "model.0005.pth" and not (folder / "last.pth").samefile(folder / "model.0005.pth")

    fit(tmp_path, resume="auto")

    assert (folder / "last.pth").samefile(folder / "model.0005.pth")


@pytest.mark.parametrize("sharded", [False, True], ids=["files", "folders of shards"])
def test_a_kill_between_any_two_operations_leaves_one_branch_or_the_other(tmp_path, sharded):
    """The names "last" and "best" lead to complete checkpoints of that branch."""
    start, ending = tmp_path / "start", "" if sharded else ".pth"
    start.mkdir()
    for epoch in range(1, 5):
        add(start, epoch, sharded=sharded, num_kept=4)
    found = []
    for folder in killed_at_each_operation(start, lambda folder: go_back(folder, f"model.0002{ending}")):
        for alias in ("last", "best"):
            CheckpointFolder(folder).named(alias)
        source = find_checkpoint(folder)
        found.append(load_checkpoint(source, whole=False)["counters"]["epoch_step"])
        clean_up(CheckpointFolder(folder), resumed_from=source)
        go_back(folder, source.name)  # no checkpoint follows it
        assert find_checkpoint(folder) == source
        assert not list(folder.glob("*.damaged"))
    assert found == sorted(found, reverse=True) and set(found) == {2, 4}
    assert {path.name for path in folder.iterdir()} == {
        "index.json", f"last{ending}", f"best{ending}", f"model.0001{ending}", f"model.0002{ending}",
        f"model.0003{ending}.abandoned", f"model.0004{ending}.abandoned",
    }  # fmt: skip


def go_back(folder, name):
    checkpoints = CheckpointFolder(folder)
    set_branch_aside(checkpoints, source=folder / name, place=place_of(name), best_first=checkpoints.records[::-1])


@pytest.mark.parametrize("source", ["best.pth", "model.0002.pth"])
def test_a_checkpoint_that_the_index_does_not_know_counts_once_a_run_goes_back_to_it(tmp_path, source):
    """Otherwise no complete checkpoint would be left if the earlier ones are gone."""
    for epoch in (2, 3):
        add(tmp_path, epoch)
        if epoch == 2:
            shutil.copyfile(tmp_path / "model.0002.pth", tmp_path / "kept")
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.keep(checkpoints.records[1:])
    shutil.move(tmp_path / "kept", tmp_path / source)

    set_branch_aside(CheckpointFolder(tmp_path), source=tmp_path / source, place=(2, math.inf), best_first=[])

    assert find_checkpoint(tmp_path) == tmp_path / "model.0002.pth"
    assert load_checkpoint(tmp_path / "model.0002.pth")["counters"]["epoch_step"] == 2
    assert not (tmp_path / "best.pth").exists()


def test_another_folders_checkpoint_leaves_what_comes_after_its_place(tmp_path):
    """A run that resumes from a copy in another folder does not move that checkpoint here."""
    for epoch in (1, 2, 3):
        add(tmp_path / "run", epoch, num_kept=3)
    copy = shutil.copyfile(tmp_path / "run" / "model.0002.pth", tmp_path / "copy.pth")
    checkpoints = CheckpointFolder(tmp_path / "run")

    set_branch_aside(checkpoints, source=copy, place=(2, math.inf), best_first=checkpoints.records)

    assert [record.epoch for record in CheckpointFolder(tmp_path / "run").records] == [1, 2]
    assert (tmp_path / "run" / "best.pth").samefile(tmp_path / "run" / "model.0001.pth")
