"""Tests of uneven shards in two real processes: all ranks train equally or all raise."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader

from runnerkit import dl
from tests.engines.together import together
from tests.interrupt import Interrupt
from tests.shares import Stream
from tests.tiny import classification, loader, train

THREE = [[0, 1], [2, 3], [4, 5]]


def fit(loaders, *callbacks, num_processes=2, **options):
    return train(loaders=loaders, callbacks=list(callbacks), num_processes=num_processes, **options)


def words_of(exception, *args, **kwargs):
    with pytest.raises(exception) as caught:
        fit(*args, **kwargs)
    return str(caught.value)


def count_steps():
    """Return {is wrapped: (steps, samples)} of an epoch of three whole batches."""
    found = {}
    for wrap in (list, dl.BatchPrefetchLoaderWrapper):
        whole = DataLoader(classification(6), batch_sampler=THREE)
        runner = fit({"train": whole if wrap is list else wrap(whole)})
        found[wrap is not list] = runner.batch_step, runner.sample_step
    return found


def evaluate_what_is_dropped():
    """Return the warnings about dropped samples and the errors of loaders without batches."""
    logger, told = logging.getLogger("runnerkit.loop.checks"), []
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: told.append(record.getMessage())
    fit({"train": loader(8, 4), "valid": loader(21, 4, drop_last=True), "all": loader(21, 4)})
    few = words_of(ValueError, {"train": loader(8, 4), "valid": loader(7, 4, drop_last=True)})
    stream = DataLoader(Stream(classification(5)), batch_size=4, drop_last=True)
    nothing = words_of(ValueError, {"train": loader(8, 4), "valid": stream})
    return told, few, nothing


def in_two_processes(logdir):
    found = count_steps()
    resumed = fit({"train": loader(25, 4)}, resume=logdir)
    return found, (resumed.batch_step, resumed.sample_step), evaluate_what_is_dropped()


def interrupted(logdir):
    """Train in one process until one sample is left."""
    save = dl.CheckpointCallback(logdir, content="runner", every_steps=6)
    with pytest.raises(KeyboardInterrupt):
        fit({"train": loader(25, 4)}, save, Interrupt(7, "on_batch_start"), num_processes=1)


def test_uneven_shares_are_trained_on_alike_and_empty_ones_refused_on_all_ranks(tmp_path):
    """No rank hangs if one sample is left after a resume, batches are too few, or an evaluation is empty."""
    interrupted(tmp_path)

    found, resumed, (told, few, nothing) = together(lambda: in_two_processes(tmp_path))

    assert found == {False: (2, 6), True: (2, 6)}
    assert resumed == (7, 25), "the last sample is one process's"
    assert len(told) == 2, "one for 21 samples, one for a stream"
    assert all("'valid'" in each and "fewer than 8 samples, 4 in each of 2 processes" in each for each in told)
    assert few == "loader 'valid' is empty: 7 samples, batch_size=4 in each of 2 processes, drop_last=True"
    assert nothing.startswith("loader 'valid' gave no batch")


def test_what_was_interrupted_resumes_with_as_many_processes_as_before(tmp_path):
    """A run interrupted with one sample left resumes on the earlier number of processes."""
    interrupted(tmp_path)

    runner = fit({"train": loader(25, 4)}, num_processes=1, resume=tmp_path)

    assert runner.batch_step == 7 and runner.sample_step == 25
    assert torch.isfinite(torch.tensor(runner.epoch_metrics["train"]["loss"]))
