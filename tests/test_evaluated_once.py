"""The evaluation loaders run once after a training step, be it within the epoch or at its end."""

import pandas as pd
import pytest
from torch import nn

from runnerkit import dl
from runnerkit.checkpoints.folder import CheckpointFolder
from tests.tiny import loader, mlp, quiet, sgd


def train(folder, *, saves_in, loaders=("train", "valid"), callbacks=(), **kwargs):
    """Train epochs of four steps; return the steps in the rows of the evaluation loader."""
    model = mlp()
    made = {"train": loader(16, 4), "valid": loader(6, 3)}
    save = dl.CheckpointCallback(
        saves_in, loader_key="valid", metric_key="loss", minimize=True, mode="runner", every_steps=1, topk=99
    )
    dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders={key: made[key] for key in loaders},
        callbacks=[save, *callbacks], logdir=folder, cpu=True, **quiet(), **kwargs,
    )  # fmt: skip
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

    rows = train(tmp_path, saves_in=tmp_path, **options)

    scored = [each.batch for each in CheckpointFolder(tmp_path / "checkpoints").records if each.score is not None]
    assert rows == expected
    if "loaders" not in options:
        assert scored == expected


def test_a_resumed_run_has_the_same_rows(tmp_path):
    """Interrupted between the last step and its evaluation, or after an evaluation, it evaluates what is left."""
    limits = {"num_steps": 8, "valid_every_steps": 2}
    expected = train(tmp_path / "whole", saves_in=tmp_path / "whole", **limits)

    for step in (2, 4, 8):

        class Fail(dl.Callback):
            def on_loader_end(self, runner, step=step):
                if runner.is_train_loader and runner.batch_step == step:
                    raise KeyboardInterrupt

            def on_batch_start(self, runner, step=step):
                if runner.is_train_loader and runner.batch_step == step + 1:
                    raise KeyboardInterrupt

        folder = tmp_path / str(step)
        with pytest.raises(KeyboardInterrupt):
            train(folder, saves_in=folder, callbacks=[Fail()], **limits)
        assert train(folder, saves_in=folder, resume="auto", **limits) == expected
