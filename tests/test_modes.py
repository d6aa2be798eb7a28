"""Tests that modules stay in the mode that the user gave them within training."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.interrupt import at
from tests.tiny import NUM_CLASSES, NUM_FEATURES, loader, train, weights


class Net(nn.Module):
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


def fit(model, *callbacks, optimizer=None, **options):
    loaders = {"train": loader(24, 4), "valid": loader(8, 4, seed=1)}
    options = {"optimizer": optimizer or rates(model), "num_epochs": 2, **options}
    train(model, callbacks=list(callbacks), loaders=loaders, **options)
    return model


def by_hand(model):
    """Train as `fit` does: the encoder is evaluated throughout."""
    optimizer, model = rates(model), model.train()
    model.encoder.eval()
    for features, targets in [*loader(24, 4)] * 2:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), targets).backward()
        optimizer.step()
    return model


def evaluates(event, *, once):
    """Return a callback that puts the encoder into evaluation mode in one event, once or each time."""
    done = []

    def evaluate(runner):
        if not (once and done):
            done.append(event)
            runner.engine.unwrap(runner.model).encoder.eval()

    return at(event, evaluate)


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
    assert torch.equal(weights(fit(net(), evaluates(event, once=once), **options)), weights(expected))


@pytest.mark.parametrize("options", [{}, {"valid_every_steps": 2}], ids=str)
def test_a_frozen_teacher_stays_in_evaluation_mode(options):
    """A model of a dict that comes frozen and in evaluation mode is not put into training mode."""

    class Distils(dl.SupervisedRunner):
        modes = ()

        def handle_batch(self, batch):
            features, targets = batch["features"], batch["targets"]
            self.modes = {*self.modes, (self.is_train_loader, self.model["teacher"].training)}
            self.batch = {"logits": self.model["student"](features), "targets": targets}

    models, runner = {"student": net(), "teacher": frozen(net())}, Distils()
    fit(models, runner=runner, optimizer=rates(models["student"]), **options)
    assert runner.modes == {(True, False), (False, False)}
    assert torch.equal(weights(models["teacher"]), weights(net()))
    assert models["student"].encoder[1].num_batches_tracked.item() == 12


@pytest.mark.parametrize("event", ["on_stage_start", "on_epoch_start", "on_loader_start", "on_batch_start"])
@pytest.mark.parametrize("options", [{}, {"valid_every_steps": 2}], ids=str)
def test_a_frozen_model_of_a_dict_stays_in_the_mode_that_a_callback_gave_it_once(event, options):
    """It cannot be meant to train."""
    teacher, done, modes = net().requires_grad_(False), [], []

    class Distils(dl.SupervisedRunner):
        def handle_batch(self, batch):
            if self.is_train_loader:
                modes.append(self.model["teacher"].training)
            self.batch = {"logits": self.model["student"](batch["features"]), "targets": batch["targets"]}

    def evaluate(runner):
        if not done:
            done.append(runner.model["teacher"].eval())

    models = {"student": net(), "teacher": teacher}
    fit(models, at(event, evaluate), runner=Distils(), optimizer=rates(models["student"]), **options)
    assert modes == [False] * 12


@pytest.mark.parametrize("options", [{}, {"valid_every_steps": 2}], ids=str)
def test_an_evaluation_within_a_training_loader_leaves_a_whole_model_in_its_mode(options):
    """A model that trains without dropout and with fixed statistics, from the start of each loader."""
    model = net()

    def evaluate(runner):
        if runner.is_train_loader:
            runner.model.eval()

    fit(model, at("on_loader_start", evaluate), **options)
    assert model.encoder[1].num_batches_tracked.item() == 0


def test_a_model_that_comes_in_evaluation_mode_is_trained():
    """Pretrained models come in evaluation mode, and some of their parts are frozen: all of it trains."""
    model, seen = net().eval(), []
    model.encoder.requires_grad_(False)

    def note(runner):
        if runner.is_train_loader:
            seen.append({each.training for each in runner.model.modules()})

    fit(model, at("on_batch_start", note))
    assert seen == [{True}] * 12


def test_a_model_that_is_evaluated_by_hand_between_epochs_trains_on():
    """A callback that leaves the whole model in evaluation mode does not end the training of its parts."""
    forgets = [at(event, lambda runner: runner.model.eval()) for event in ("on_epoch_end", "on_epoch_start")]

    assert torch.equal(weights(fit(net(), *forgets)), weights(fit(net())))


def test_evaluation_leaves_modes_to_those_of_training():
    """Modes that an evaluation loader's events set end with it."""
    expected = fit(net())

    def sample(runner):
        if runner.is_valid_loader:
            runner.model.encoder[2].train()

    found, again = (fit(net(), at("on_loader_start", sample), valid_every_steps=2) for _ in range(2))
    assert torch.equal(weights(found)[:8], weights(again)[:8])
    assert found.head[1].num_batches_tracked == expected.head[1].num_batches_tracked


def test_a_batch_norm_learns_again_once_it_is_unfrozen():
    """FreezeCallback gives back the mode that it took."""
    model = net()
    fit(model, dl.FreezeCallback("encoder", until_epoch=1))
    assert model.encoder[1].num_batches_tracked.item() == 6


@pytest.mark.parametrize("stop", [3, 8])
def test_a_resumed_run_has_the_modes_of_the_interrupted_one(tmp_path, stop):
    """Modes that were set once within training hold after a resume, within an epoch and after an evaluation."""

    def rest(runner):
        if runner.is_train_loader and runner.batch_step == 2:
            runner.model.encoder.eval()

    def run(**options):
        return fit(net(), at("on_batch_start", rest), valid_every_steps=2, **options)

    whole = run()
    run(logdir=tmp_path, num_steps=stop)
    assert torch.equal(weights(run(logdir=tmp_path, resume="auto")), weights(whole))
