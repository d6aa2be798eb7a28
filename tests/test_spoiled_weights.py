"""A checkpoint with NaN weights never replaces a finite one, whatever asks for the save."""

import functools
import logging
import os
import signal

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.models.finite import non_finite_part
from tests.tiny import loader, mlp, train

FIRST_BAD_STEP, NEVER = 13, 10**9  # in epochs of 10


class Stepping(dl.Runner):
    """Runner that steps itself on a loss that becomes NaN, of which the engine's callbacks see nothing."""

    def handle_batch(self, batch):
        features, targets = batch
        loss = nn.functional.cross_entropy(self.model(features), targets)
        self.optimizer.zero_grad()
        self.engine.backward(loss * float("nan") if self.batch_step >= self.bad_step else loss)
        self.engine.step(self.optimizer)


class Spoiled(dl.SupervisedRunner):
    """Runner whose loss becomes NaN, and which a signal may stop later."""

    bad_step, stop_step = FIRST_BAD_STEP, None

    def handle_batch(self, batch):
        super().handle_batch(batch)
        if self.is_train_loader and self.batch_step >= self.bad_step:
            self.batch["logits"] = self.batch["logits"] * float("nan")
        if self.batch_step == self.stop_step:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(logdir, *, callback=None, bad_step=FIRST_BAD_STEP, stop_step=None, steps_itself=False, **options):
    runner = Stepping() if steps_itself else Spoiled()
    runner.bad_step, runner.stop_step = bad_step, stop_step
    saves = {} if callback is None else {"save": dl.CheckpointCallback(logdir, **{"content": "runner", **callback})}
    options = {"num_epochs": 2, "loaders": {"train": loader(40, 4)}, "logdir": logdir, **options}
    return train(options.pop("model", None), runner=runner, callbacks=saves, **options)


def names_of_finite(logdir):
    """Return the names of the checkpoints, after a check that their weights are finite."""
    folder = CheckpointFolder(logdir / "checkpoints")
    for record in folder.records:
        state = load_checkpoint(folder.folder / record.name)
        tensors = state.get("model_state_dict", state).values()
        assert all(each.isfinite().all() for each in tensors), record.name
    return [record.name for record in folder.records]


def assert_resumable(logdir, **options):
    assert names_of_finite(logdir)
    runner = fit(logdir, resume="auto", bad_step=NEVER, **{"num_epochs": 3, **options})
    assert runner.epoch_step == 3 and all(each.isfinite().all() for each in runner.model.parameters())


@pytest.mark.parametrize(
    "callback",
    [None, {}, {"every_steps": 2}, {"every_minutes": 1e-9}, {"every_steps": 2, "asynchronous": True}],
    ids=["the default", "epochs", "steps", "minutes", "in the background"],
)
@pytest.mark.parametrize("policy", ["keep", "raise"])
def test_nan_weights_replace_no_finite_checkpoint(tmp_path, callback, policy):
    """Those before the NaN are kept, and the run resumes from the newest of them."""
    with pytest.raises(FloatingPointError if policy == "raise" else ValueError):
        fit(tmp_path, callback=callback, non_finite=policy)

    assert_resumable(tmp_path)


@pytest.mark.parametrize("callback", [None, {"every_steps": 2}], ids=["the default", "steps"])
def test_a_loss_that_nobody_checks_is_no_different(tmp_path, callback):
    """A runner that steps itself trains on to the end."""
    runner = fit(tmp_path, callback=callback, steps_itself=True)

    assert not any(each.isfinite().all() for each in runner.model.parameters())
    assert_resumable(tmp_path)


SHARDED = functools.partial(dl.FullyShardedDataParallelEngine, sharded_checkpoints=True)


@pytest.mark.parametrize("kind", [dl.DistributedDataParallelEngine, SHARDED], ids=["DDP", "FSDP2, sharded"])
def test_ranks_agree_on_it(tmp_path, kind):
    """Each rank sees its shard only."""
    engine = kind(2, device="cpu")
    with pytest.raises(ValueError, match="became nan"):
        fit(tmp_path, callback={"every_steps": 1}, engine=engine, bad_step=8)

    assert names_of_finite(tmp_path)[-1].startswith("model.0002.00000007")
    assert_resumable(tmp_path, engine=engine)


def test_a_run_that_is_stopped_says_why_it_saved_nothing(tmp_path, caplog):
    """The next process starts from the last finite checkpoint."""
    fit(tmp_path, num_epochs=1, bad_step=NEVER)

    with pytest.raises(SystemExit) as ended, caplog.at_level(logging.WARNING):
        fit(tmp_path, resume="auto", stop_step=15)

    assert ended.value.code == 75
    assert "without saving, because '0.weight' of the model is NaN" in caplog.text
    assert "a resumed run starts from model.0001.pth" in caplog.text
    assert_resumable(tmp_path)


def test_weights_alone_are_checked_too(tmp_path, caplog):
    """content="model"; and the warning names the parameter, and what to pass."""
    with pytest.raises(ValueError, match="became nan"):
        fit(tmp_path, callback={"every_steps": 2, "content": "model"})

    assert names_of_finite(tmp_path)[-1] == "model.0002.00000012.pth"
    assert "'0.weight' of the model is NaN or infinite" in caplog.text and "non_finite='raise'" in caplog.text


def test_a_run_without_a_finite_checkpoint_saves_what_it_has(tmp_path):
    """There is nothing to protect, and a user may want to look at it."""
    fit(tmp_path, bad_step=1, num_epochs=1, steps_itself=True)

    assert (tmp_path / "checkpoints" / "last.pth").exists()


def test_an_infinite_mask_is_not_a_defect(tmp_path):
    """A buffer of minus infinity hides positions from attention; frozen parameters are the user's."""
    model = mlp()
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    model.frozen = nn.Parameter(torch.full((2,), torch.inf), requires_grad=False)

    fit(tmp_path, model=model, bad_step=NEVER, num_epochs=2)

    names = [record.name for record in CheckpointFolder(tmp_path / "checkpoints").records]
    assert names == ["model.0001.pth", "model.0002.pth"]


class Learned(nn.Module):
    """A criterion with a trained parameter and a buffer that it updates."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("center", torch.zeros(()))

    def forward(self, logits, targets):
        return nn.functional.cross_entropy(logits, targets) * self.scale + (1 - self.scale) ** 2


@pytest.mark.parametrize("name", ["scale", "center"])
def test_a_spoiled_criterion_is_one(tmp_path, caplog, name):
    """Its parameters are trained and saved as those of the model."""

    class Spoil(dl.Callback):
        def on_step_end(self, runner):
            if runner.batch_step >= FIRST_BAD_STEP:
                getattr(runner.criterion, name).data.fill_(float("nan"))

    model, criterion = mlp(), Learned()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    callbacks = [Spoil(), dl.CheckpointCallback(tmp_path, content="runner", every_steps=2)]
    loaders = {"train": loader(40, 4), "valid": loader(8, 4)}
    options = {"model": model, "criterion": criterion, "optimizer": optimizer, "loaders": loaders, "num_steps": 13}
    train(**options, callbacks=callbacks, num_epochs=2)

    folder = CheckpointFolder(tmp_path / "checkpoints")
    states = [load_checkpoint(folder.folder / record.name)["criterion_state_dict"][""] for record in folder.records]
    assert states and all(each.isfinite() for state in states for each in state.values())
    assert f"'{name}' of the criterion is NaN" in caplog.text


def test_a_batch_norm_that_saw_nan_is_one(tmp_path):
    """An optimizer that skips the step leaves finite parameters, but not the running mean."""
    model = mlp(batch_norm=True)
    fit(tmp_path, model=model, bad_step=NEVER, num_epochs=1)
    assert non_finite_part({"": model}) is None

    model[1].running_mean[0] = float("nan")

    assert non_finite_part({"": model}) == "1.running_mean"
    assert non_finite_part({"student": model}) == "student.1.running_mean"


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_every_dtype_is_checked(dtype, value):
    model = nn.ParameterDict({"empty": torch.ones(0), "whole": torch.ones(3), "odd": torch.ones(2, 3).to(dtype)})
    with torch.no_grad():
        model["odd"].view(-1)[4] = complex(0.0, value) if dtype.is_complex else value

    expected = "odd" if not torch.isfinite(model["odd"]).all() else None
    assert non_finite_part({"": model}) == expected


def test_the_first_spoiled_part_is_named():
    """Whatever the dtypes: those of one dtype are looked at together."""
    tensors = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(2)}
    model = nn.ParameterDict(tensors)
    with torch.no_grad():
        model["b"][0] = model["c"][1] = float("nan")

    assert non_finite_part({"": model}) == "b"
