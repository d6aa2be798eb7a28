"""StopOnSignal without a CheckpointCallback ends a run, and saves nothing."""

import os
import signal

import pytest

from runnerkit.callbacks.control.parts.stop_on_signal import StopOnSignal
from tests.interrupt import at
from tests.tiny import loader, mlp, train

STEP = 3


def fit(callbacks, **options):
    train(mlp(), loaders={"train": loader(40, 8), "valid": loader(16, 8)}, callbacks=callbacks, **options)


def terminate(loader_key):
    """Return a callback that sends this process SIGTERM in one step of training, or in the evaluation after it."""

    def act(runner):
        if (runner.loader_key, runner.batch_step) == (loader_key, STEP if loader_key == "train" else 5):
            os.kill(os.getpid(), signal.SIGTERM)

    return at("on_batch_end", act)


@pytest.mark.parametrize(
    ("make", "name", "step"),
    [
        (lambda: [StopOnSignal(), terminate("train")], "SIGTERM", STEP),
        (lambda: [StopOnSignal(), terminate("valid")], "SIGTERM", 5),
        (lambda: [StopOnSignal(max_hours=1e-9)], "max_hours=1e-09", 1),
    ],
    ids=["a step", "an evaluation", "max_hours"],
)
def test_alone_it_ends_the_run_and_says_that_nothing_was_saved(caplog, make, name, step):
    """After the step, or the epoch of the evaluation; the exit code is 75, and the handlers are restored."""
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        fit(make(), num_epochs=3)

    assert ended.value.code == 75
    assert f"{name}: stopped after step {step} without saving, because no CheckpointCallback" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_in_the_last_evaluation_does_not_end_a_finished_run():
    """There is nothing left to stop."""
    fit([StopOnSignal(), terminate("valid")])
