"""The evaluation loaders run once after a training step, be it within the epoch or at its end."""

import pandas as pd
import pytest

from runnerkit import dl
from runnerkit.checkpoints.folder import CheckpointFolder
from tests.interrupt import Interrupt, at
from tests.schedules import Learns, Steps
from tests.tiny import loader, train


def trained(folder, *, loaders=("train", "valid"), callbacks=(), **options):
    """Train epochs of four steps; return the steps in the rows of the evaluation loader."""
    made = {"train": loader(16, 4), "valid": loader(6, 3)}
    judge = {"monitor": "valid/loss", "mode": "min"}
    save = dl.CheckpointCallback(folder, content="runner", every_steps=1, keep_best=99, **judge)
    train(loaders={key: made[key] for key in loaders}, callbacks=[save, *callbacks], logdir=folder, **options)
    return pd.read_csv(folder / "csv" / "valid.csv")["step"].tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_steps": 8, "valid_every_steps": 2}, [2, 4, 6, 8]),
        ({"num_steps": 6, "valid_every_steps": 3}, [3, 4, 6]),
        ({"num_epochs": 2, "valid_every_steps": 4}, [4, 8]),
        ({"num_epochs": 2, "valid_every_steps": 2, "callbacks": [dl.CheckRunCallback(2)]}, [2, 4]),
        ({"num_steps": 3, "valid_every_steps": 1, "accumulation_steps": 2}, [2, 4, 6]),
        # The evaluation loader of an epoch runs before its training.
        ({"num_steps": 8, "valid_every_steps": 4, "loaders": ("valid", "train")}, [0, 4, 4, 8]),
    ],
)
def test_a_step_is_evaluated_and_scored_once(tmp_path, monkeypatch, options, expected):
    """At the last step of a run or an epoch, and in a run resumed at any step, rows and scores are not repeated."""
    monkeypatch.setattr(CheckpointFolder, "keep", lambda *_: None)

    rows = trained(tmp_path, **options)

    scored = [each.batch for each in CheckpointFolder(tmp_path / "checkpoints").records if each.score is not None]
    assert rows == expected
    if "loaders" not in options:
        assert scored == expected


def test_a_resumed_run_has_the_same_rows(tmp_path):
    """Interrupted between the last step and its evaluation, or after an evaluation, it evaluates what is left."""
    limits = {"num_steps": 8, "valid_every_steps": 2}
    expected = trained(tmp_path / "whole", **limits)

    for step in (2, 4, 8):
        folder = tmp_path / str(step)
        with pytest.raises(KeyboardInterrupt):
            trained(
                folder, callbacks=[Interrupt(step, "on_loader_end"), Interrupt(step + 1, "on_batch_start")], **limits
            )
        assert trained(folder, resume="auto", **limits) == expected


def test_a_run_that_goes_on_after_a_limit_has_the_evaluations_of_a_longer_one(tmp_path):
    """Rows, scores and calls of `on_validation_end`, whether the limit is reached once or twice; they lacked step 6."""

    def results(folder, *limits):
        calls = []
        note = at("on_validation_end", lambda runner: calls.append(runner.optimizer_step))
        for num_steps in limits:
            rows = trained(folder, num_steps=num_steps, valid_every_steps=3, resume="auto", callbacks=[note])
        records = CheckpointFolder(folder / "checkpoints").records
        return rows, [(each.batch, each.score) for each in records if each.score is not None], calls

    expected = results(tmp_path / "whole", 8)

    assert expected[0] == [3, 4, 6, 8]
    assert results(tmp_path / "once", 6, 8) == expected
    assert results(tmp_path / "twice", 6, 6, 8) == expected


def test_the_last_step_of_an_epoch_is_evaluated_after_it():
    """Once, and not within the epoch; rows would hide a second pass, as a place has one."""
    passes, within = [], []
    notes = [
        at("on_loader_start", lambda runner: passes.append((runner.optimizer_step, runner.loader_key))),
        at("on_validation_end", lambda runner: within.append(runner.optimizer_step)),
    ]

    train(loaders={"train": loader(16, 4), "valid": loader(6, 3)}, callbacks=notes, num_epochs=2, valid_every_steps=2)

    assert [step for step, key in passes if key == "valid"] == [2, 4, 6, 8]
    assert within == [2, 6]


@pytest.mark.parametrize("kind", [Steps, Learns])
def test_steps_that_handle_batch_makes_are_evaluated_and_saved_when_they_are_due(tmp_path, monkeypatch, kind):
    """Also those without `learn`, which are counted after the batch only."""
    monkeypatch.setattr(CheckpointFolder, "keep", lambda *_: None)
    seen = []

    class Counted(kind):
        num_made = 0

        def handle_batch(self, batch):
            if self.is_train_loader:
                super().handle_batch(batch)
                self.num_made += 1

    note = at("on_loader_start", lambda runner: runner.is_train_loader or seen.append(runner.num_made))

    train(
        runner=Counted(),
        loaders={"train": loader(28, 4), "valid": loader(4, 4)},
        callbacks=[note, dl.CheckpointCallback(tmp_path, content="runner", every_steps=3)],
        criterion=None,
        num_steps=7,
        valid_every_steps=3,
    )

    assert seen == [3, 6, 7]
    assert [each.batch for each in CheckpointFolder(tmp_path / "checkpoints").records] == [3, 6, 7]
