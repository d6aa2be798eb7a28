"""Early stopping ends a stage when its metric no longer improves."""

import math

import pytest

from runnerkit.callback import CallbackOrder
from runnerkit.callbacks.control.early_stop import EarlyStoppingCallback
from runnerkit.loop.run import Run
from tests.callbacks.stand_ins import make_runner


def make_callback(patience=2, *, minimize=True, min_delta=1e-6):
    return EarlyStoppingCallback(
        patience, monitor="valid/score", mode="min" if minimize else "max", min_delta=min_delta
    )


def stops_after(callback, scores):
    """Return the epoch after which the stage ends, or None; a score of None means that the loader did not run."""
    runner = make_runner(current_run=Run())
    for epoch, score in enumerate(scores, start=1):
        runner.epoch_step = epoch
        runner.epoch_metrics = {} if score is None else {"valid": {"score": score}}
        callback.on_epoch_end(runner)
        if runner.need_early_stop:
            return epoch
    return None


@pytest.mark.parametrize(
    ("scores", "arguments", "expected"),
    [
        ([3.0, 2.0, 1.0, 0.5], {}, None),
        ([3.0, 2.0, 2.5, 2.1], {}, 4),
        ([3.0, 3.1, 2.0, 2.1, 2.2], {}, 5),
        ([3.0, 2.0, 2.5, 2.1], {"minimize": False}, 3),
        ([1.0, 1.0, 1.0], {}, 3),
        ([1.0, None, 1.1, None, None, 1.2], {}, 6),
        ([math.nan, math.nan], {}, 2),
        ([1.0, math.nan, 0.5, math.nan, math.nan], {}, 5),
        ([math.nan, 1.0, 0.5, 0.4], {}, None),
        ([1.0, math.inf, 0.9, -math.inf], {}, None),
        ([3.0, 2.75, 2.5], {"min_delta": 0.5}, 3),
        ([3.0, 2.25, 1.5], {"min_delta": 0.5}, None),
    ],
)
def test_stage_ends_after_so_many_bad_epochs_in_a_row(scores, arguments, expected):
    """A NaN and a gain below min_delta count as bad and never as the best; epochs without the loader do not count."""
    assert stops_after(make_callback(**arguments), scores) == expected


def test_new_stage_starts_anew():
    """Stages may have different losses, so the best score is reset."""
    callback = make_callback()
    stops_after(callback, [1.0, 2.0])

    callback.on_stage_start(make_runner())

    assert stops_after(callback, [5.0, 6.0]) is None


def test_count_goes_on_after_a_resume():
    """Bad epochs before the interruption count."""
    before, after = make_callback(), make_callback()
    stops_after(before, [1.0, 2.0])

    after.on_stage_start(make_runner())
    after.load_state_dict(before.state_dict())

    assert stops_after(after, [3.0]) == 1


def test_it_acts_before_the_checkpoint_of_its_epoch():
    """Otherwise the checkpoint would miss this epoch's count, and a resumed run would train longer."""
    assert CallbackOrder.Scheduler < make_callback().order < CallbackOrder.Checkpoint
    assert make_callback().requires == (("valid", "score"),)
