"""Optimizers with ``train()`` and ``eval()``, as schedule-free ones have, against hand-written loops."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint
from tests.engines.together import together
from tests.interrupt import Interrupt, at
from tests.programs.schedule_free import ScheduleFreeSGD
from tests.tiny import loader, mlp, train, weights

NUM_SAMPLES, BATCH_SIZE = 40, 8


def by_hand(num_epochs=3):
    """Train without an evaluation; return the weights for evaluation and, by epoch, the loss with them."""
    model = mlp()
    optimizer, losses = ScheduleFreeSGD(model.parameters()), []
    for _ in range(num_epochs):
        optimizer.train()
        for features, targets in loader(NUM_SAMPLES, BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(features), targets).backward()
            optimizer.step()
        trained = [each.detach().clone() for each in model.parameters()]
        optimizer.eval()
        result = weights(model)
        with torch.no_grad():
            losses.append(F.cross_entropy(model(loader(16, 16).dataset.tensors[0]), loader(16, 16).dataset.tensors[1]))
            for each, value in zip(model.parameters(), trained, strict=True):
                each.copy_(value)
        optimizer.param_groups[0]["train_mode"] = True
    return result, [float(each) for each in losses]


def fit(*, batch_size=BATCH_SIZE, num_epochs=3, **options):
    loaders = {"train": loader(NUM_SAMPLES, batch_size), "valid": loader(16, batch_size)}
    optimizer = lambda parameters: ScheduleFreeSGD(parameters)  # noqa: E731
    runner = train(optimizer=optimizer, loaders=loaders, num_epochs=num_epochs, **options)
    return weights(runner.model), runner


@pytest.mark.parametrize("options", [{}, {"valid_every_steps": 2}], ids=["each epoch", "within epochs"])
def test_it_trains_and_evaluates_with_its_own_weights(options):
    """An evaluation changes no digit of the training; the run ends with the weights for evaluation."""
    expected, losses = by_hand()

    found, runner = fit(**options)

    assert torch.equal(found, expected)
    values = [epoch["valid"]["loss"] for epoch in runner.experiment_metrics.values()]
    assert values == pytest.approx(losses, rel=1e-6)
    assert not runner.optimizer.param_groups[0]["train_mode"]


def test_checkpoints_hold_both(tmp_path):
    """Inference gets the weights for evaluation, and a run that is killed within an epoch resumes exactly."""
    expected, losses = by_hand()

    def saver(**options):
        return dl.CheckpointCallback(
            tmp_path, monitor="valid/loss", mode="min", content="runner", every_steps=1, **options
        )

    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[saver(), Interrupt(13)], valid_every_steps=5)
    found, _ = fit(callbacks=[saver(resume_runner=tmp_path, load_best_on_end=True)], valid_every_steps=5)

    assert torch.equal(found, expected)
    state = load_checkpoint(tmp_path / "checkpoints" / "best.pth")
    loaded = mlp()
    loaded.load_state_dict(state["model_state_dict"])
    assert torch.equal(weights(loaded), expected)
    assert state["optimizer_state_dict"][""]["param_groups"][0]["train_mode"]
    assert losses[-1] == min(losses)


def test_plain_weights_are_those_for_evaluation(tmp_path):
    """A checkpoint of mode "model", saved within an epoch, too."""
    fit(num_epochs=1, callbacks=[dl.CheckpointCallback(tmp_path, every_steps=1)])

    loaded = mlp()
    loaded.load_state_dict(load_checkpoint(tmp_path / "checkpoints" / "last.pth"))
    assert torch.equal(weights(loaded), by_hand(1)[0])


def test_an_evaluation_called_within_training_has_them_too():
    """After the last step of an epoch its loss is that of the validation, and training continues unchanged."""
    found = []

    def evaluate(runner):
        if runner.loader_batch_step == runner.loader_batch_len:
            found.append(runner.evaluate_loader(loader(16, BATCH_SIZE))["loss"])

    result, _ = fit(callbacks=[at("on_step_end", evaluate)])

    expected, losses = by_hand()
    assert torch.equal(result, expected)
    assert found == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"engine": dl.CPUEngine()}], ids=["its engine", "another engine"])
def test_a_prediction_called_within_training_has_them_too(options):
    """Also a generator of predictions that stays open while training continues, in which each batch has those of then.

    Another engine predicts with a copy of the model, as it was at the call.
    """
    found, waiting = [], []

    class Predict(dl.Callback):
        def on_step_end(self, runner):
            if runner.loader_batch_step == 1:
                waiting.append(runner.predict_loader(loader=loader(16, BATCH_SIZE), **options))
                next(waiting[0])
            if runner.loader_batch_step == runner.loader_batch_len:
                found.extend([runner.predict_loader(loader=loader(16, 16), **options), *waiting])
                found[:] = [torch.cat([each["logits"] for each in one]) for one in found]

    result, _ = fit(callbacks=[Predict()], num_epochs=1)

    expected, _ = by_hand(1)
    assert torch.equal(result, expected)
    with torch.no_grad():
        logits = _with_weights(expected)(loader(16, 16).dataset.tensors[0])
    torch.testing.assert_close(found[0], logits)
    if not options:
        torch.testing.assert_close(found[1], logits[BATCH_SIZE:])


def test_what_the_end_of_a_stage_evaluates_or_predicts_leaves_its_weights():
    """The optimizer is still in the mode for evaluation afterwards."""

    def use(runner):
        runner.evaluate_loader(loader(16, BATCH_SIZE))
        list(runner.predict_loader(loader=loader(16, BATCH_SIZE)))

    result, runner = fit(callbacks=[at("on_stage_end", use)])

    assert torch.equal(result, by_hand()[0])
    assert not runner.optimizer.param_groups[0]["train_mode"]


def _with_weights(values):
    model = mlp()
    nn.utils.vector_to_parameters(values.float(), model.parameters())
    return model


def test_a_second_average_is_refused():
    """EMACallback would exchange the same weights."""
    with pytest.raises(ValueError, match=r"averages weights, and so does the optimizer"):
        fit(callbacks=[dl.EMACallback()])


def in_processes():
    found = []
    for kind in (dl.DistributedDataParallelEngine, dl.FullyShardedDataParallelEngine):
        engine = kind(2, device="cpu", timeout_s=60)
        result, runner = fit(engine=engine, batch_size=BATCH_SIZE // 2, valid_every_steps=2)
        found.append((result, runner.epoch_metrics["valid"]["loss"]))
    return found


@pytest.mark.slow
def test_in_two_processes_the_weights_are_those_of_one():
    """Whole and sharded weights are exchanged in place."""
    expected, losses = by_hand()
    for actual, loss in together(in_processes):
        assert (actual - expected).abs().max() < 1e-6
        assert loss == pytest.approx(losses[-1], rel=1e-5)
