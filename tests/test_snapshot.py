"""The documented content of a checkpoint is complete, and a run goes back to the place where it was collected."""

from dataclasses import fields

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.plain_state import copied
from runnerkit.resume.loader_place import LoaderPlace
from runnerkit.resume.snapshot import Content, Snapshot
from tests.tiny import loader, mlp, sgd, train


@pytest.mark.parametrize(("callbacks", "absent"), [([], {"trained_model_state_dict"}), ([dl.EMACallback(0.5)], set())])
def test_a_checkpoint_holds_the_keys_that_are_documented(tmp_path, callbacks, absent):
    """Each key of a file is in the list of one class, and each in the list is in the file of a run that has it."""
    train(logdir=tmp_path, callbacks=[*callbacks, dl.CheckpointCallback(tmp_path, content="runner", every_steps=3)])
    within, at_end = (load_checkpoint(path) for path in sorted((tmp_path / "checkpoints").glob("model.*")))

    assert within.keys() == at_end.keys() == Content.__annotations__.keys() - {"shards"} - absent
    assert within["within"].keys() == {each.name for each in fields(LoaderPlace)}
    assert at_end["within"] is None


class GoingBack(dl.Callback):
    """Go back, once, from the end of the second epoch to that of the first."""

    epochs: tuple[int, ...] = ()

    def on_epoch_end(self, runner):
        self.epochs += (runner.epoch_step,)
        if self.epochs == (1,):
            self.snapshot = Snapshot(copied(Snapshot.of(runner).state))
        elif self.epochs == (1, 2):
            self.snapshot.apply(runner)


def fit(*callbacks):
    model = mlp(dropout=0.5, batch_norm=True)
    optimizer = sgd(model)
    return train(
        model,
        optimizer=optimizer,
        scheduler=StepLR(optimizer, 1, 0.5),
        loaders={"train": loader(16, 4, shuffle=True)},
        callbacks=callbacks,
        num_epochs=3,
    )


def test_a_run_that_goes_back_repeats_its_steps():
    """Weights, optimizer, scheduler, counters, metrics and random numbers are those of a run that never went back."""
    back, expected = GoingBack(), fit()

    runner = fit(back)

    assert back.epochs == (1, 2, 2, 3)
    assert (runner.epoch_step, runner.batch_step) == (3, 12)
    assert runner.experiment_metrics == expected.experiment_metrics
    assert runner.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"]
    for one, other in zip(runner.model.state_dict().values(), expected.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
