"""Tests that modules stay in the mode that the user gave them within training."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import NUM_CLASSES, NUM_FEATURES, loader, quiet, weights


class Net(nn.Module):
    """An encoder with batch norm and dropout, and a head."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, NUM_CLASSES))

    def forward(self, features):
        return self.head(self.encoder(features))


def net():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


def frozen(module):
    return module.requires_grad_(False).eval()


def rates(model):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def fit(model, *callbacks, **options):
    runner = dl.SupervisedRunner()
    runner.train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=rates(model), callbacks=list(callbacks),
        loaders={"train": loader(24, 4), "valid": loader(8, 4, seed=1)}, num_epochs=2,
        **{"engine": dl.CPUEngine(), **options}, **quiet(),
    )  # fmt: skip
    return model


def by_hand(model):
    """Train as `fit` does: the encoder is evaluated throughout."""
    optimizer, model = rates(model), model.train()
    model.encoder.eval()
    for _ in range(2):
        for features, targets in loader(24, 4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), targets).backward()
            optimizer.step()
    return model


class Evaluates(dl.Callback):
    """Puts the encoder into evaluation mode in one event, once or each time."""

    def __init__(self, event, *, once):
        super().__init__()

        def on_event(runner):
            if not (once and self.is_done):
                self.is_done = True
                runner.engine.unwrap(runner.model).encoder.eval()

        self.is_done = False
        setattr(self, event, on_event)


ENGINES = [
    dl.CPUEngine,
    *(
        pytest.param(partial(engine, 2, device="cpu"), marks=pytest.mark.slow, id=engine.__name__)
        for engine in (dl.DistributedDataParallelEngine, dl.FullyShardedDataParallelEngine)
    ),
]


@pytest.mark.parametrize("options", [{}, {"valid_every_steps": 2}], ids=str)
def test_a_frozen_part_stays_in_evaluation_mode(options):
    """An encoder that comes frozen and in evaluation mode keeps its statistics and drops nothing."""
    model = net()
    frozen(model.encoder)
    expected = by_hand(copy.deepcopy(model))
    assert torch.equal(weights(fit(model, **options)), weights(expected))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_frozen_part_stays_in_it_in_processes(engine):
    """Under DDP and FSDP its statistics and weights stay, and the head's statistics move."""
    model = net()
    before = frozen(model.encoder)
    kept = copy.deepcopy(before.state_dict())
    fit(model, engine=engine())
    torch.testing.assert_close(model.encoder.state_dict(), kept, rtol=0, atol=0)
    assert model.head[1].num_batches_tracked.item() == 6


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("event", ["on_stage_start", "on_epoch_start", "on_loader_start", "on_batch_start"])
@pytest.mark.parametrize("options", [{}, {"valid_every_steps": 2}], ids=str)
def test_a_mode_that_is_set_within_training_stays(event, once, options):
    """A callback may put a part into evaluation mode: it stays there, also after evaluations."""
    expected = by_hand(net())
    assert torch.equal(weights(fit(net(), Evaluates(event, once=once), **options)), weights(expected))


@pytest.mark.parametrize("options", [{}, {"valid_every_steps": 2}], ids=str)
def test_a_frozen_teacher_stays_in_evaluation_mode(options):
    """A model of a dict that comes frozen and in evaluation mode is not put into training mode."""

    class Distils(dl.SupervisedRunner):
        modes = ()

        def handle_batch(self, batch):
            features, targets = batch["features"], batch["targets"]
            self.modes = {*self.modes, (self.is_train_loader, self.model["teacher"].training)}
            self.batch = {"logits": self.model["student"](features), "targets": targets}

    models = {"student": net(), "teacher": frozen(net())}
    before = weights(models["teacher"])
    runner = Distils()
    runner.train(
        model=models, criterion=nn.CrossEntropyLoss(), optimizer=rates(models["student"]), engine=dl.CPUEngine(),
        loaders={"train": loader(24, 4), "valid": loader(8, 4, seed=1)}, num_epochs=2, **options, **quiet(),
    )  # fmt: skip
    assert runner.modes == {(True, False), (False, False)}
    assert torch.equal(weights(models["teacher"]), before)
    assert models["student"].encoder[1].num_batches_tracked.item() == 12


def test_a_model_that_comes_in_evaluation_mode_is_trained():
    """Pretrained models come in evaluation mode, and some of their parts are frozen: all of it trains."""
    model, seen = net().eval(), []
    model.encoder.requires_grad_(False)

    class Modes(dl.Callback):
        def on_batch_start(self, runner):
            if runner.is_train_loader:
                seen.append({each.training for each in runner.model.modules()})

    fit(model, Modes())
    assert seen == [{True}] * 12


def test_a_model_that_is_evaluated_by_hand_between_epochs_trains_on():
    """A callback that leaves the whole model in evaluation mode does not end the training of its parts."""
    expected = fit(net())

    class Forgets(dl.Callback):
        def on_epoch_end(self, runner):
            runner.model.eval()

        def on_epoch_start(self, runner):
            runner.model.eval()

    assert torch.equal(weights(fit(net(), Forgets())), weights(expected))


def test_evaluation_leaves_modes_to_those_of_training():
    """Modes that an evaluation loader's events set end with it."""
    expected = fit(net())

    class Samples(dl.Callback):
        def on_loader_start(self, runner):
            if runner.is_valid_loader:
                runner.model.encoder[2].train()

    found = fit(net(), Samples(), valid_every_steps=2)
    assert torch.equal(weights(found)[:8], weights(fit(net(), Samples(), valid_every_steps=2))[:8])
    assert found.head[1].num_batches_tracked == expected.head[1].num_batches_tracked


def test_a_batch_norm_learns_again_once_it_is_unfrozen():
    """FreezeCallback gives back the mode that it took."""
    model = net()
    fit(model, dl.FreezeCallback("encoder", until_epoch=1))
    assert model.encoder[1].num_batches_tracked.item() == 6


@pytest.mark.parametrize("stop", [3, 8])
def test_a_resumed_run_has_the_modes_of_the_interrupted_one(tmp_path, stop):
    """Modes that were set once within training hold after a resume, within an epoch and after an evaluation."""

    class Rests(dl.Callback):
        """Puts the encoder into evaluation mode at the second step of the run."""

        def on_batch_start(self, runner):
            if runner.is_train_loader and runner.batch_step == 2:
                runner.model.encoder.eval()

    whole = fit(net(), Rests(), valid_every_steps=2)
    fit(net(), Rests(), logdir=tmp_path, num_steps=stop, valid_every_steps=2)
    found = fit(net(), Rests(), logdir=tmp_path, resume="auto", valid_every_steps=2)
    assert torch.equal(weights(found), weights(whole))
