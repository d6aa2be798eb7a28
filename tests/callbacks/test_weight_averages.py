"""EMACallback and SWACallback: averages equal the closed form, are used for evaluation, and survive an interruption."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from runnerkit import dl, utils
from tests.callbacks.test_resumed_callbacks import resumable
from tests.engines.together import together
from tests.tiny import classification, loader, mlp, sgd, train, train_by_hand, weights

DECAY = 0.8


class Trace(dl.Callback):
    """A callback that records the weights after each optimizer step, in evaluation and at epoch ends."""

    def __init__(self, every=1):
        super().__init__()
        self.every = every
        self.trained, self.evaluated, self.at_epoch_end = [], [], []

    def on_batch_end(self, runner):
        model = runner.engine.unwrap(runner.model)
        if not runner.is_train_loader:
            self.evaluated.append(weights(model))
        elif runner.loader_batch_step % self.every == 0 or runner.loader_batch_step == runner.loader_batch_len:
            self.trained.append(weights(model))

    def on_epoch_end(self, runner):
        self.at_epoch_end.append(weights(runner.engine.unwrap(runner.model)))


def average(*callbacks, model=None, accumulate=1, **options):
    model = model or mlp()
    loaders = {"train": loader(40, 4, shuffle=True), "valid": loader(21, 4, seed=1)}
    defaults = {"optimizer": sgd(model, lr=0.5), "loaders": loaders, "num_epochs": 3}
    steps = dl.OptimizerCallback("loss", accumulation_steps=accumulate)
    return train(model, callbacks=[steps, *callbacks], **(defaults | options))


def exponential_average(trained, *, decay=DECAY):
    """Compute the closed form in float64."""
    result = trained[0]
    for each in trained[1:]:
        result = decay * result + (1 - decay) * each
    return result


def averaged_by_torch(model, optimizer, **options):
    """Train with a hand-written loop; return torch's average of the weights after its steps."""
    result = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    hook = optimizer.register_step_post_hook(lambda *_: result.update_parameters(model))
    train_by_hand(model, optimizer, list(loader(40, 4)), **options)
    hook.remove()
    return result.module


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_exponential_average_counts_steps_and_is_the_closed_form(accumulate):
    """Ten batches accumulated by three are four steps; evaluation and the run's end use the average."""
    trace = Trace(every=accumulate)

    runner = average(dl.EMACallback(DECAY), trace, num_epochs=2, accumulate=accumulate)

    num_steps = -(-10 // accumulate)
    assert len(trace.trained) == 2 * num_steps
    expected = exponential_average(trace.trained)
    torch.testing.assert_close(weights(runner.model), expected, rtol=1e-6, atol=1e-6)  # float32, a few dozen steps
    torch.testing.assert_close(trace.evaluated[-1], expected, rtol=1e-6, atol=1e-6)
    first = exponential_average(trace.trained[:num_steps])
    torch.testing.assert_close(trace.evaluated[0], first, rtol=1e-6, atol=1e-6)
    assert torch.equal(trace.at_epoch_end[0], trace.trained[num_steps - 1]), "training continues with its own weights"


def test_an_exponential_average_is_that_of_torch_bit_for_bit():
    """It equals AveragedModel after each step of a hand-written loop, and training is not affected."""
    model, by_hand, trace = mlp(), mlp(), Trace()
    expected = averaged_by_torch(by_hand, sgd(by_hand, lr=0.5), num_epochs=3)

    average(dl.EMACallback(DECAY), trace, model=model, loaders={"train": loader(40, 4), "valid": loader(21, 4)})

    assert torch.equal(trace.at_epoch_end[-1], weights(by_hand))
    assert torch.equal(weights(model), weights(expected))


@pytest.mark.parametrize("validate", [True, False])
def test_evaluation_with_the_average_is_an_option(validate):
    """The stage ends with the average either way."""
    trace = Trace()

    runner = average(dl.EMACallback(DECAY, validate=validate), trace, valid_every_steps=7)

    # 30 steps; evaluated after 7, 14, 21, 28 within epochs and at the ends of three
    last = trace.evaluated[-1]
    assert torch.equal(last, weights(runner.model) if validate else trace.trained[-1])
    assert len(trace.evaluated) == 7 * 6
    torch.testing.assert_close(weights(runner.model), exponential_average(trace.trained), rtol=1e-6, atol=1e-6)
    for number, step in enumerate([7, 10, 14, 20, 21, 28, 30]):
        expected = exponential_average(trace.trained[:step]) if validate else trace.trained[step - 1]
        torch.testing.assert_close(trace.evaluated[6 * number], expected, rtol=1e-6, atol=1e-6)  # weights up to 22


def test_a_checked_run_evaluates_the_average_again():
    """check=True evaluates each loader again at its end and compares the metrics."""
    runner = average(dl.EMACallback(DECAY), model=mlp(batch_norm=True), check=True)

    assert runner.epoch_step == 3


@pytest.mark.parametrize("use_buffers", [True, False])
def test_buffers_are_the_models_own_unless_they_are_averaged(use_buffers):
    """Buffers here are the running means of batch norm."""
    model, buffers = mlp(batch_norm=True), []

    class Keep(dl.Callback):
        def on_batch_end(self, runner):
            if runner.is_train_loader:
                buffers.append(runner.model[1].running_mean.double().clone())

    average(Keep(), dl.EMACallback(DECAY, use_buffers=use_buffers), model=model)

    expected = exponential_average(buffers) if use_buffers else buffers[-1]
    tolerance = 1e-6 if use_buffers else 0
    torch.testing.assert_close(model[1].running_mean.double(), expected, rtol=tolerance, atol=tolerance)


class TwoModels(dl.Runner):
    """A runner with hand-written steps, one of them every second batch, as in a GAN."""

    def handle_batch(self, batch):
        features, targets = batch
        for number, (key, model) in enumerate(self.model.items(), start=1):
            loss = nn.functional.cross_entropy(model(features), targets)
            self.batch_metrics[f"loss_{key}"] = loss.detach()
            if self.is_train_loader and self.loader_batch_step % number == 0:
                self.engine.zero_grad(self.optimizer[key])
                self.engine.backward(loss)
                self.engine.step(self.optimizer[key])


def train_two(models, **options):
    options = {"optimizer": {key: sgd(model) for key, model in models.items()}, **options}
    return train(models, runner=TwoModels(), **options)


def test_each_of_several_models_is_averaged_by_the_steps_of_its_own_optimizer(tmp_path):
    """Steps made by handle_batch count, and a checkpoint contains one model's average beside the other's weights."""
    models, trained = {"one": mlp(seed=1), "two": mlp(seed=2)}, []

    class Keep(dl.Callback):
        def on_batch_end(self, runner):
            if runner.is_train_loader and runner.loader_batch_step % 2 == 0:
                trained.append(weights(runner.model["two"]))

    loaders = {"train": loader(40, 4), "valid": loader(8, 4)}
    callbacks = [Keep(), dl.EMACallback(DECAY, model_key="two")]
    train_two(models, loaders=loaders, callbacks=callbacks, num_epochs=2, logdir=tmp_path)

    assert len(trained) == 10
    torch.testing.assert_close(weights(models["two"]), exponential_average(trained), rtol=1e-6, atol=1e-6)
    state = utils.load_checkpoint(tmp_path / "checkpoints" / "last.pth")
    for key, model in models.items():
        assert all(torch.equal(state["model_state_dict"][key][name], each) for name, each in model.state_dict().items())
    still_trained = mlp()
    still_trained.load_state_dict(state["trained_model_state_dict"]["two"])
    assert torch.equal(weights(still_trained), trained[-1])


class TwoStages(dl.SupervisedRunner):
    @property
    def stages(self):
        return ["train_first", "train_second", "infer"]


def test_a_second_stage_starts_from_the_average_of_the_first_and_averages_anew():
    """One callback serves all stages and does nothing in inference."""
    model, trace, first = mlp(), Trace(), mlp()
    loaders, optimizer = {"train": loader(40, 4)}, torch.optim.SGD(model.parameters(), lr=0.5)

    train(model, runner=TwoStages(), optimizer=optimizer, loaders=loaders, callbacks=[dl.EMACallback(DECAY), trace])

    second = averaged_by_torch(first, torch.optim.SGD(first.parameters(), lr=0.5))
    assert torch.equal(trace.trained[9], weights(first))
    train_by_hand(second, torch.optim.SGD(second.parameters(), lr=0.5), list(loader(40, 4)))
    assert torch.equal(trace.trained[19], weights(second))
    torch.testing.assert_close(weights(model), exponential_average(trace.trained[10:]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("content", ["runner", "model"])
def test_the_best_is_the_average_that_was_judged_best(tmp_path, content):
    """The best checkpoint and its file contain the average, not the weights trained at that time."""
    trace = Trace()
    judge, model = {"monitor": "valid/loss", "mode": "min"}, mlp()
    checkpoint = dl.CheckpointCallback(tmp_path, content=content, load_best_on_end=True, **judge)

    optimizer = sgd(model, lr=3.0)
    runner = average(dl.EMACallback(DECAY), checkpoint, trace, model=model, optimizer=optimizer, num_epochs=6)

    losses = {epoch: metrics["valid"]["loss"] for epoch, metrics in runner.experiment_metrics.items()}
    best = min(losses, key=losses.get)
    assert best != 6, "this test needs a run that gets worse"
    assert torch.equal(weights(runner.model), trace.evaluated[6 * best - 1])
    saved = mlp()
    state = torch.load(tmp_path / "checkpoints" / "best.pth", weights_only=True)
    saved.load_state_dict(state["model_state_dict"] if content == "runner" else state)
    assert torch.equal(weights(saved), weights(runner.model))
    assert runner.evaluate_loader(loader(21, 4, seed=1))["loss"] == losses[best]


def parameters(vector):
    """Return the part of :func:`weights` without batch norm statistics."""
    state = mlp(batch_norm=True).state_dict()
    parts = torch.split(vector, [each.numel() for each in state.values()])
    return torch.cat([part for name, part in zip(state, parts, strict=True) if name.endswith(("weight", "bias"))])


def test_the_mean_of_epochs_is_the_closed_form_with_statistics_of_its_own():
    """Weights are the mean of epochs 2 to 4, and batch norm statistics those of torch's update_bn on what the model
    gets; generators, metrics and training flags do not change."""
    model, trace = mlp(batch_norm=True), Trace()
    double = dl.BatchTransformCallback(lambda features: 2 * features, input_key="features")

    runner = average(double, dl.SWACallback(2), trace, model=model, num_epochs=4, loaders={"train": loader(40, 4)})

    mean = torch.stack([trace.trained[10 * epoch - 1] for epoch in (2, 3, 4)]).mean(dim=0)
    torch.testing.assert_close(parameters(weights(model)), parameters(mean), rtol=1e-6, atol=1e-6)
    by_torch = copy.deepcopy(model)
    update_bn([(2 * features, targets) for features, targets in loader(40, 4)], by_torch)
    assert torch.equal(weights(by_torch), weights(model))
    assert runner.batch_step == 40 and runner.loader_key == "train" and "loss" in runner.loader_metrics


def test_a_stage_that_ends_before_the_first_average_says_so(caplog):
    """After early stopping, for example, the model has its trained weights."""

    class Stop(dl.Callback):
        def on_epoch_end(self, runner):
            runner.need_early_stop = True

    trace = Trace()
    runner = average(dl.SWACallback(2), Stop(), trace)

    assert "ended before epoch 2: no weights were averaged" in caplog.text
    assert torch.equal(weights(runner.model), trace.trained[-1])


def test_skipped_steps_are_not_averaged():
    """An infinite gradient makes the scaler skip the step, and the average does not change."""

    class Infinite(dl.Callback):
        def __init__(self):
            super().__init__(order=dl.CallbackOrder.Backward + 1)

        def on_batch_end(self, runner):
            if runner.is_train_loader and runner.batch_step == 1:
                next(runner.model.parameters()).grad.fill_(torch.inf)

    trace = Trace()
    engine = dl.CPUEngine(precision=dl.AMP(torch.float16, scaler={"init_scale": 1.0}))

    runner = average(Infinite(), dl.EMACallback(DECAY), trace, num_epochs=1, engine=engine)

    torch.testing.assert_close(weights(runner.model), exponential_average(trace.trained[1:]), rtol=1e-6, atol=1e-6)


class Compare(dl.Callback):
    """A callback that fails if ranks evaluate different weights."""

    def on_batch_end(self, runner):
        if not runner.is_train_loader:
            one, other = runner.engine.gather_object(weights(runner.model))
            assert torch.equal(one, other)
            runner.batch_metrics["compared"] = 1.0


def on_ranks(folder):
    """Run all cases of two processes in one launch."""
    engine = dl.DistributedDataParallelEngine(2, device="cpu")
    kwargs = {"engine": engine, "loaders": {"train": loader(40, 4), "valid": loader(16, 4)}}
    ema, buffers, swa = mlp(), mlp(batch_norm=True), mlp(batch_norm=True)
    runners = [
        average(dl.EMACallback(DECAY), Compare(), model=ema, **kwargs),
        average(dl.EMACallback(DECAY, use_buffers=True), Compare(), model=buffers, **kwargs),
        average(dl.SWACallback(2), Compare(), model=swa, **kwargs),
    ]
    assert all(runner.epoch_metrics["valid"]["compared"] == 1.0 for runner in runners)
    whole = resumable(folder / "whole", "ema", engine=engine)
    with pytest.raises(KeyboardInterrupt):
        resumable(folder / "broken", "ema", engine=engine, interrupt_at=13)
    resumed = resumable(folder / "broken", "ema", engine=engine)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.experiment_metrics == whole.experiment_metrics
    return ema, swa


def test_processes_hold_the_same_average_and_renew_statistics_together(tmp_path):
    """Batches of four on two ranks average like batches of eight on one; a resumed run equals the whole one."""
    ema, swa = together(lambda: on_ranks(tmp_path))

    alone = mlp()
    average(dl.EMACallback(DECAY), model=alone, loaders={"train": loader(40, 8), "valid": loader(16, 4)})
    torch.testing.assert_close(weights(ema), weights(alone), rtol=0, atol=1e-5)  # summation order differs
    by_torch = copy.deepcopy(swa)
    rows = classification(40).tensors[0]
    update_bn([rows[start : start + 8][rank::2] for start in range(0, 40, 8) for rank in range(2)], by_torch)
    torch.testing.assert_close(weights(swa), weights(by_torch), rtol=1e-6, atol=1e-6)


def test_a_model_that_is_not_trained_is_refused():
    """Its average would never change."""
    models = {"one": mlp(), "two": mlp()}

    with pytest.raises(ValueError, match="no optimizer of the runner has parameters of model 'two'"):
        train_two(models, optimizer={"one": sgd(models["one"])}, callbacks=[dl.EMACallback(model_key="two")])


def test_the_average_of_another_model_is_refused(tmp_path):
    """A resumed run averages the models that the checkpoint has averages of."""

    def start(key):
        models = {"one": mlp(seed=1), "two": mlp(seed=2)}
        train_two(models, callbacks=[dl.EMACallback(model_key=key)], logdir=tmp_path, resume="auto")

    start("one")
    with pytest.raises((ValueError, KeyError), match=r"averages of the models \['one'\], but .* \['two'\]"):
        start("two")
