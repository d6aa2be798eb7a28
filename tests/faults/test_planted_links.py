"""Symbolic links that another user plants in a logdir do not cause files elsewhere to be overwritten or deleted."""

import os

import pytest

from runnerkit import dl
from runnerkit.storage.atomic_file import write_text
from runnerkit.storage.logdir_lock import is_held
from tests.storage.stored_runs import At
from tests.tiny import loader, train


@pytest.fixture
def logdir(tmp_path):
    """Return a logdir that exists before the run."""
    path = tmp_path / "log"
    path.mkdir()
    return path


@pytest.fixture
def elsewhere(tmp_path):
    """Return a folder with files that look like a run's."""
    path = tmp_path / "elsewhere"
    path.mkdir()
    for name in (".model.0001.pth.7.tmp", "model.0001.pth", "events.out.tfevents.1.host", "train.csv", "notes"):
        (path / name).write_text("precious")
    return path


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("is_there", [True, False], ids=["to a file", "to nothing"])
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_is_left_alone(logdir, tmp_path, is_there):
    """The target is neither emptied nor created; the error says what to do."""
    victim = tmp_path / "victim"
    if is_there:
        victim.write_text("precious")
    (logdir / ".lock").symlink_to(victim)

    with pytest.raises(OSError, match=r"\.lock is a symbolic link to .*victim: .*delete the link"):
        train(logdir=logdir)

    assert victim.read_text() == "precious" if is_there else not victim.exists()
    assert not is_held(logdir)
    assert sorted(path.name for path in logdir.iterdir()) == [".lock"]


@pytest.mark.parametrize("name", ["checkpoints", "csv", "tensorboard"])
def test_a_folder_of_the_run_that_is_a_link_is_refused_and_nothing_there_is_deleted(logdir, elsewhere, name):
    """This includes a resumed run, which deletes partial files and truncates logs."""
    before = content(elsewhere)
    (logdir / name).symlink_to(elsewhere)

    with pytest.raises(OSError, match=f"{name} is a symbolic link to .*elsewhere: "):
        train(logdir=logdir, resume=None)
    (logdir / name).unlink()
    train(logdir=logdir, resume="auto")
    if name != "checkpoints":
        (logdir / name).rename(logdir / "moved")
        (logdir / name).symlink_to(elsewhere)
        with pytest.raises(OSError, match=f"{name} is a symbolic link to .*elsewhere: "):
            train(logdir=logdir, resume="auto", num_epochs=2)

    assert content(elsewhere) == before


@pytest.mark.parametrize("logger", [dl.TensorboardLogger, dl.JSONLLogger, dl.CSVLogger])
def test_a_log_that_is_a_link_is_not_cut_when_the_run_resumes(logdir, tmp_path, logger):
    """This covers TensorBoard's events, JSON lines and CSV tables."""
    alone = {"csv": None, "tensorboard": None, "mine": logger(logdir)}
    train(logdir=logdir, loggers=alone)
    log = next(path for path in logdir.rglob("*") if "tfevents" in path.name or path.suffix in (".csv", ".jsonl"))
    victim = log.rename(tmp_path / "victim")
    before = victim.read_bytes()
    log.symlink_to(victim)

    with pytest.raises(OSError, match=r"is a symbolic link to .*victim: "):
        train(logdir=logdir, loggers=alone, resume="auto", num_epochs=2)

    assert victim.read_bytes() == before


@pytest.mark.parametrize("path", ["csv/valid", "tensorboard/valid", "csv/valid/easy.csv", "metrics.jsonl"])
@pytest.mark.parametrize("moment", ["before the run", "during the run"])
def test_a_link_below_the_folders_of_the_run_is_not_followed(logdir, elsewhere, path, moment):
    """A key such as "valid/easy" has its logs in a folder of their own."""
    before = content(elsewhere)

    def plant():
        (logdir / path).parent.mkdir(exist_ok=True, parents=True)
        (logdir / path).symlink_to(elsewhere / "train.csv" if "." in path else elsewhere)

    if moment == "before the run":
        plant()
    callbacks = [At(plant, step=1)] if moment == "during the run" else []
    loaders = {"train": loader(16, 4), "valid/easy": loader(16, 4)}
    loggers = {} if path.startswith(("csv", "tensorboard")) else {"mine": dl.JSONLLogger(logdir)}
    with pytest.raises(OSError, match=rf"{path} is a symbolic link to .*elsewhere"):
        train(logdir=logdir, loaders=loaders, loggers=loggers, callbacks=callbacks)

    assert content(elsewhere) == before


def test_the_name_a_file_is_written_under_first_cannot_be_foreseen(tmp_path):
    """Otherwise a link of that name would redirect the writer."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to(victim)

    write_text(tmp_path / "file", "new")

    assert victim.read_text() == "precious" and (tmp_path / "file").read_text() == "new"


def test_a_logdir_that_is_itself_a_link_holds_a_run_and_its_continuation(tmp_path):
    """Such a link, for example to another disk, is the owner's choice."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "log").symlink_to(tmp_path / "disk")

    train(logdir=tmp_path / "log")
    runner = train(logdir=tmp_path / "log", resume="auto", num_epochs=2)

    assert runner.epoch_step == 2
    assert (tmp_path / "disk" / "checkpoints" / "last.pth").is_file() and (tmp_path / "log").is_symlink()
