"""A run may be stopped at any moment, and limited again below what it has done; nothing is lost or repeated."""

import shutil

import pytest
import torch

from tests.faults.fuzz_resume import Case, Segment
from tests.faults.fuzz_run import train
from tests.faults.fuzz_setting import Setting
from tests.test_budget import train as train_any

SETTINGS = [
    Setting("map", (10,), 4, num_epochs=2, dropout=0.4),
    Setting("stream", (15,), 3, num_epochs=2, accumulation=3, valid_every_steps=1),
    Setting("lanes", (2, 5, 1, 2, 0, 4), 2, lanes=(1, 2), num_epochs=2, accumulation=3),
    Setting("lanes", (4, 5, 6), 2, lanes=(1, 2), num_epochs=2, epoch_steps=3),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=["map", "stream", "lanes", "endless lanes"])
def test_a_run_is_limited_below_what_it_did_until_the_time_was_up(tmp_path, setting):
    """The time is noticed after each step, and at each epoch's end."""
    assert_nothing_is_lost(setting, [("clock", moment, 1) for moment in range(1, 9)], tmp_path)


@pytest.mark.parametrize("setting", SETTINGS, ids=["map", "stream", "lanes", "endless lanes"])
def test_a_run_is_limited_again_at_what_it_has_done(tmp_path, setting):
    """A run that does nothing leaves the place as it was."""
    ways = ("num_steps", 2, 2), ("num_samples", 2, 2), ("SIGTERM", 2, 2)

    assert_nothing_is_lost(setting, ways, tmp_path)


def assert_nothing_is_lost(setting, ways, folder):
    """End a run in each way, at a moment, limit it to a number of steps, and compare it with the uninterrupted one."""
    whole = None
    for number, (how, at, num_steps) in enumerate(ways):
        case = Case(number, setting, (Segment(how, at), Segment("num_steps", num_steps), Segment("end")))
        jobs = [job for _, job in case.jobs(folder)]
        whole = whole or jobs[0]()

        assert case.difference(folder, [whole, *(job() for job in jobs[1:])]) == "", (how, at)
        shutil.rmtree(folder / "parts")


@pytest.mark.parametrize("name", ["last.pth", ""])
def test_a_limited_run_in_another_folder_leaves_the_place_in_the_first_one(tmp_path, name):
    """It does nothing; one with a higher limit continues within the epoch all the same."""
    whole, expected = train_any(num_epochs=2)
    with pytest.raises(SystemExit):
        train_any(num_epochs=2, logdir=tmp_path / "first", max_hours=1e-9)
    source = tmp_path / "first" / "checkpoints" / name

    train_any(num_epochs=2, num_steps=1, logdir=tmp_path / "second", resume=source)
    resumed, found = train_any(num_epochs=2, logdir=tmp_path / "second", resume="auto")

    assert torch.equal(found, expected)
    assert resumed.sample_step == whole.sample_step


def test_a_limit_in_samples_takes_what_an_epoch_has_without_its_dropped_batch():
    """26 samples are six batches of 4; the rest of the limit, which is smaller than a batch, is the last step."""
    setting = Setting("map", (26,), 4, drop_last=True)

    for limit, steps in {24: 6, 25: 7, 26: 7, 33: 9, 49: 13}.items():
        found = train(Setting(**{**vars(setting), "num_samples": limit}))
        assert (found.num_steps, found.num_samples, found.told) == (steps, limit, steps)
