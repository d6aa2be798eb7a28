"""Tests of the loop: order of events, counters, stages, evaluation, prediction and flags."""

import copy
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.monitor import Monitor
from tests.interrupt import at
from tests.shares import Stream
from tests.tiny import classification, loader, mlp, sgd, train, train_by_hand, weights

EVENTS = [event for event in dir(dl.Callback) if event.startswith("on_")]


def recorder(base, log, name):
    events = {event: lambda self, runner, event=event: log.append((name, event)) for event in EVENTS}
    return type("Recorder", (base,), events)


class Minimal(dl.IRunner):
    def __init__(self):
        super().__init__()
        self.batches_seen = []

    def get_loaders(self, stage):
        return {"train": loader(8, 4), "valid": loader(4, 4)}

    def get_model(self, stage):
        return mlp()

    def handle_batch(self, batch):
        self.batches_seen.append((self.loader_key, self.model.training, torch.is_grad_enabled()))
        self.batch_metrics["rows"] = len(batch[0])


def test_a_runner_needs_three_methods():
    """Loaders whose key starts with `train` train with gradients; the others evaluate without."""
    runner = Minimal().run()

    assert runner.batches_seen == [("train", True, True)] * 2 + [("valid", False, False)]
    assert runner.epoch_metrics == {"train": {"rows": 4.0}, "valid": {"rows": 4.0}}
    assert isinstance(runner.engine, dl.IEngine)


def test_events_come_in_order_the_runners_own_around_the_callbacks():
    """At start events the runner's hook comes before the callbacks, at end events after them."""
    log = []

    class Recorded(recorder(Minimal, log, "runner")):
        def get_callbacks(self, stage):
            return {"recorder": recorder(dl.Callback, log, "callback")()}

    Recorded().run()

    per_batch = ["on_batch_start", "on_batch_end"]
    assert [event for name, event in log if name == "callback"] == [
        *["on_experiment_start", "on_stage_start", "on_epoch_start"],
        *["on_loader_start", *[*per_batch, "on_step_end"] * 2, "on_loader_end"],
        *["on_loader_start", *per_batch, "on_loader_end"],
        *["on_epoch_end", "on_stage_end", "on_experiment_end"],
    ]
    assert [name for name, event in log if event == "on_epoch_start"] == ["runner", "callback"]
    assert [name for name, event in log if event == "on_epoch_end"] == ["callback", "runner"]


def test_callbacks_act_by_order_and_node():
    """Callbacks run by ascending order; a callback for workers does not run in the main process."""
    calls = []
    kinds = {"late": {"order": 100}, "early": {"order": 0}, "worker": {"node": dl.CallbackNode.Worker}}

    class Ordered(Minimal):
        def get_callbacks(self, stage):
            return {key: at("on_epoch_start", lambda _, key=key: calls.append(key), **kinds[key]) for key in kinds}

    Ordered().run()

    assert calls == ["early", "late"]


class Stages(dl.IRunner):
    """Runner with stages that pretrain, finetune and infer with the same model."""

    stages = ("pretrain", "finetune", "infer")

    def __init__(self):
        super().__init__()
        self.lengths = {"pretrain": 2, "finetune": 1, "infer": 1}
        self.log = []

    def get_stage_len(self, stage):
        return self.lengths[stage]

    def get_loaders(self, stage):
        return {"infer": loader(8, 4)} if stage == "infer" else {"train": loader(8, 4)}

    def get_model(self, stage):
        return self.model if self.model is not None else mlp()

    def get_criterion(self, stage):
        return nn.CrossEntropyLoss()

    def get_optimizer(self, stage, model):
        return sgd(model, lr=0.1 if stage == "pretrain" else 0.01)

    def get_callbacks(self, stage):
        if stage == "infer":
            return {}
        return {
            "criterion": dl.CriterionCallback("logits", "targets", metric_key="loss"),
            "backward": dl.BackwardCallback("loss"),
            "optimizer": dl.OptimizerCallback("loss"),
        }

    def handle_batch(self, batch):
        self.batch = {"targets": batch[1], "logits": self.model(batch[0])}

    def on_epoch_end(self, runner):
        self.log.append(
            (self.stage_key, self.epoch_step, self.stage_epoch_step, self.batch_step, self.stage_batch_step)
        )


def test_stages_have_their_own_components_and_counters():
    """The model is kept between stages, each stage has its own optimizer, and `infer...` stages have none."""
    runner = Stages().run()

    assert runner.log == [
        ("pretrain", 1, 1, 2, 2),
        ("pretrain", 2, 2, 4, 4),
        ("finetune", 3, 1, 6, 2),
        ("infer", 4, 1, 6, 0),
    ]
    assert runner.optimizer is None
    reference = mlp()
    batches = list(loader(8, 4))
    train_by_hand(reference, sgd(reference, lr=0.1), batches, num_epochs=2)
    train_by_hand(reference, sgd(reference, lr=0.01), batches)
    assert torch.equal(weights(runner.model), weights(reference))


def supervised(runner=None, model=None, **options):
    return train(model, runner=runner, **{"loaders": {"train": loader(40, 4), "valid": loader(20, 4)}, **options})


def test_counters_count_training_steps_and_samples():
    """Evaluation does not change batch_step and sample_step; global_* are aliases."""
    runner = supervised(num_epochs=3)

    assert (runner.epoch_step, runner.batch_step, runner.sample_step) == (3, 30, 120)
    assert (runner.global_epoch_step, runner.global_batch_step, runner.global_sample_step) == (3, 30, 120)
    assert (runner.loader_key, runner.loader_batch_step, runner.loader_sample_step) == ("valid", 5, 20)
    assert runner.loader_batch_len == 5


def test_check_and_overfit_shorten_a_run():
    """`check` runs three batches of each loader for three epochs; `overfit` repeats one as often as it has batches."""
    counts, seen = [], {"train": [], "valid": []}
    count = at("on_loader_end", lambda runner: counts.append((runner.loader_key, runner.loader_batch_step)))
    see = at("on_batch_end", lambda runner: seen[runner.loader_key].append(runner.batch["features"].clone()))

    runner = supervised(num_epochs=10, check=True, callbacks=[count])
    supervised(overfit=True, callbacks=[see], num_epochs=2)

    assert counts == [("train", 3), ("valid", 3)] * 3 and runner.epoch_step == 3
    assert {key: len(batches) for key, batches in seen.items()} == {"train": 20, "valid": 10}
    assert all(torch.equal(each, batches[0]) for batches in seen.values() for each in batches)


def test_early_stopping_ends_the_stage_not_the_next_one():
    """Early stopping ends only the current stage."""

    class Stopping(Stages):
        def get_callbacks(self, stage):
            stop = dl.EarlyStoppingCallback(1, monitor="train/loss", mode="max")
            return {**super().get_callbacks(stage), **({"stop": stop} if stage == "pretrain" else {})}

    runner = Stopping()
    runner.lengths["pretrain"] = 50
    runner.run()

    stages = [stage for stage, *_ in runner.log]
    assert 1 < stages.count("pretrain") < 50
    assert stages.count("finetune") == 1 and stages.count("infer") == 1


def test_validation_every_n_steps_leaves_training_as_it_was():
    """valid_every_steps evaluates between steps and does not change the weights and training metrics."""
    plain_model, often_model = mlp(batch_norm=True, dropout=0.2), mlp(batch_norm=True, dropout=0.2)
    steps, losses = [], set()

    def note(runner):
        steps.append((runner.batch_step, runner.loader_key, runner.model.training))
        losses.add(runner.epoch_metrics["valid"]["loss"])

    plain = supervised(model=plain_model, num_epochs=2)
    validation = at("on_validation_end", note)
    often = supervised(model=often_model, num_epochs=2, valid_every_steps=4, callbacks=[validation])

    assert steps == [(step, "train", True) for step in (4, 8, 12, 16)] and len(losses) == 4
    assert torch.equal(weights(plain_model), weights(often_model))
    assert often.experiment_metrics == plain.experiment_metrics


def test_models_and_optimizers_may_be_dicts():
    """A runner can train several models with their own optimizers and losses, as a GAN does."""
    models = {"a": mlp(), "b": mlp(seed=2)}

    class Two(dl.Runner):
        def handle_batch(self, batch):
            for key, model in self.model.items():
                self.batch_metrics[f"loss_{key}"] = nn.functional.cross_entropy(model(batch[0]), batch[1])

    callbacks = [dl.BackwardCallback(f"loss_{key}") for key in "ab"]
    callbacks += [dl.OptimizerCallback(f"loss_{key}", model_key=key, optimizer_key=key) for key in "ab"]
    optimizers = {key: sgd(model) for key, model in models.items()}
    runner = train(models, runner=Two(), optimizer=optimizers, callbacks=callbacks)

    for key, seed in {"a": 1, "b": 2}.items():
        reference = mlp(seed=seed)
        train_by_hand(reference, sgd(reference), loader(16, 4))
        assert torch.equal(weights(runner.model[key]), weights(reference))
    assert {"lr_a", "lr_b", "loss_a", "loss_b"} <= set(runner.epoch_metrics["train"])


def test_supervised_runner_steps_each_of_several_optimizers():
    """All step on the gradients of the one loss, at their own rates, as in a hand-written loop."""

    def optimizers(model):
        return {"body": sgd(model[0]), "head": torch.optim.Adam(model[3].parameters(), lr=0.01)}

    model, reference = mlp(), mlp()
    runner = train(model, optimizer=optimizers(model))

    by_hand = optimizers(reference).values()
    for features, targets in loader(16, 4):
        for each in by_hand:
            each.zero_grad()
        nn.functional.cross_entropy(reference(features), targets).backward()
        for each in by_hand:
            each.step()
    assert torch.equal(weights(model), weights(reference))
    assert runner.optimizer_step == 4
    assert runner.epoch_metrics["train"]["lr_body"] == 0.1 and runner.epoch_metrics["train"]["lr_head"] == 0.01


def test_a_user_may_do_it_all_by_hand():
    """handle_batch can call backward and step itself; numbers and tensors in batch_metrics are averaged."""

    class ByHand(dl.Runner):
        def handle_batch(self, batch):
            features, targets = batch
            loss = nn.functional.cross_entropy(self.model(features), targets)
            if self.is_train_loader:
                self.optimizer.zero_grad()
                self.engine.backward(loss)
                self.optimizer.step()
            self.batch_metrics.update({"loss": loss.item(), "tensor": loss})

    model, reference = mlp(), mlp()
    runner = supervised(ByHand(), model=model, criterion=None)
    train_by_hand(reference, sgd(reference), loader(40, 4))

    assert torch.equal(weights(model), weights(reference))
    metrics = runner.epoch_metrics["train"]
    assert metrics["loss"] == pytest.approx(metrics["tensor"], rel=1e-12)


def test_a_runners_own_meter_needs_no_super_call():
    """A runner can write loader_metrics in on_loader_end without calling super()."""

    class Meter(dl.SupervisedRunner):
        def on_loader_start(self, runner):
            self.rows = 0

        def on_batch_end(self, runner):
            self.rows += self.batch_size

        def on_loader_end(self, runner):
            self.loader_metrics["rows"] = self.rows

    runner = supervised(Meter())

    assert {key: metrics["rows"] for key, metrics in runner.epoch_metrics.items()} == {"train": 40.0, "valid": 20.0}


@pytest.mark.parametrize(
    ("keys", "batch"),
    [
        ({}, lambda x, y: (x, y)),
        ({}, lambda x, y: {"features": x, "targets": y}),
        ({"input_key": ["left", "right"]}, lambda x, y: {"left": x[:, :3], "right": x[:, 3:], "targets": y}),
        ({"input_key": {"l": "left", "r": "right"}}, lambda x, y: {"l": x[:, :3], "r": x[:, 3:], "targets": y}),
        ({"output_key": ["logits", "again"]}, lambda x, y: (x, y)),
        ({"output_key": {"out": "logits"}}, lambda x, y: (x, y)),
    ],
)
def test_supervised_runner_maps_keys(keys, batch):
    """SupervisedRunner accepts tuples and dicts as batches and a str, list or dict as keys."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, left, right=None):
            logits = self.layers(left if right is None else torch.cat([left, right], dim=1))
            output_key = keys.get("output_key")
            return {"out": logits} if isinstance(output_key, dict) else (logits, 1) if output_key else logits

    features, targets = classification(16).tensors
    model = Net()
    batches = [batch(x, y) for x, y in zip(features.split(4), targets.split(4), strict=True)]

    criterion = [dl.CriterionCallback("logits", "targets")] if isinstance(keys.get("output_key"), list) else []
    supervised(dl.SupervisedRunner(**keys), model=model, loaders={"train": batches}, callbacks=criterion)

    reference = mlp()
    train_by_hand(reference, sgd(reference), loader(16, 4))
    assert torch.equal(weights(model), weights(reference))


class ByRole(nn.Module):
    """A model whose arguments are not in the order of the batch, and may not change places."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, item, user):
        return self.layer(item - 2 * user)[:, 0]


@pytest.mark.parametrize("keys", [["user", "item"], {"user": "user", "item": "item"}], ids=["list", "dict"])
@pytest.mark.parametrize("is_tuple", [True, False])
def test_a_list_of_keys_passes_each_part_by_its_name(keys, is_tuple):
    """The model, the criterion and functional metrics get keyword arguments, whatever the order in the batch."""
    torch.manual_seed(0)
    parts = {"user": torch.rand(8, 3), "item": torch.rand(8, 3), "targets": torch.rand(8)}
    item, user, model = parts["item"], parts["user"], ByRole()
    expected = (model(item, user) - 2 * parts["targets"]).square().mean().item()

    def criterion(target, output):
        return (output - 2 * target).square().mean()

    metric = dl.FunctionalBatchMetricCallback(
        lambda targets, logits: criterion(targets, logits),
        input_key=["logits"], target_key=["targets"], metric_key="same",
    )  # fmt: skip
    callbacks = [dl.CriterionCallback({"logits": "output"}, {"targets": "target"}), metric]
    loaders = {"train": [tuple(parts.values()) if is_tuple else parts]}
    runner = train(
        model, runner=dl.SupervisedRunner(input_key=keys), criterion=criterion, loaders=loaders, callbacks=callbacks
    )

    metrics = runner.epoch_metrics["train"]
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6) and metrics["same"] == metrics["loss"]
    assert [each.tolist() for each in runner.inputs_of(parts, model)] == [item.tolist(), user.tolist()]


def test_a_criterion_of_several_outputs_gets_all_by_name():
    """The targets too."""

    class Heads(nn.Linear):
        def forward(self, features):
            return super().forward(features).unbind(1)

    def criterion(labels, high, low):
        return (high - 3 * low - labels).square().mean()

    model = Heads(6, 2)
    features, labels = classification(8).tensors
    low, high = model(features)
    expected = criterion(labels, high, low).item()
    runner = dl.SupervisedRunner(output_key=["low", "high"], target_key="labels")
    train(model, runner=runner, criterion=criterion, loaders={"train": [(features, labels)]})

    assert runner.epoch_metrics["train"]["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_key_of_input_and_target_is_one_part_of_a_batch():
    """An autoencoder with (image, label) batches raises; it was trained on the labels."""
    features, labels = torch.ones(4, 2), torch.zeros(4, 2)
    runner, criterion = dl.SupervisedRunner(target_key="features"), nn.MSELoss()

    with pytest.raises(TypeError, match=r"a batch of loader 'train' is a tuple of 2, not .* a tuple of \['features'\]"):
        train(nn.Linear(2, 2), runner=runner, criterion=criterion, loaders={"train": [(features, labels)]})
    for batch in ((features,), features, {"features": features, "label": labels}):
        train(nn.Identity(), runner=runner, criterion=criterion, optimizer=None, loaders={"train": [batch]})
        assert runner.epoch_metrics["train"]["loss"] == 0


def test_inputs_that_forward_takes_by_name_only_have_no_order():
    """An export by position raises."""

    class ByName(nn.Module):
        def forward(self, *, user):
            return user

    with pytest.raises(TypeError, match=r"ByName\.forward takes \['user'\] by name only"):
        dl.SupervisedRunner(input_key=["user"]).inputs_of((torch.ones(1), torch.ones(1)), ByName())


def test_the_parts_of_a_batch_have_names_before_handle_batch_and_callbacks():
    """SupervisedRunner names them; Runner hands over what the loader gave; what cannot be named is left as it is."""
    seen = []

    class Named(dl.SupervisedRunner):
        def handle_batch(self, batch):
            assert batch is self.batch and list(batch) == ["features", "targets"]
            super().handle_batch(batch)

    class Three(dl.SupervisedRunner):
        def handle_batch(self, batch):
            features, targets, _ = batch
            super().handle_batch((features, targets))

    tensors = classification(4).tensors
    for kind, batch in ((Named, tensors), (OwnLoss, tensors), (Three, (*tensors, None))):
        see = at("on_batch_start", lambda runner: seen.append(type(runner.batch)))
        train(runner=kind(), loaders={"train": [batch]}, callbacks=[see])

    assert seen == [dict, tuple, tuple]


def test_an_own_forward_calls_the_model():
    """In training, evaluation and prediction, with the outputs that it names; `super().forward` is the usual one."""

    class Doubles(dl.SupervisedRunner):
        def forward(self, batch, **kwargs):
            outputs = super().forward({**batch, "features": 2 * batch["features"]}, **kwargs)
            return {**outputs, "norms": outputs["logits"].norm(dim=1)}

    model, loaders = mlp(), {"valid": loader(8, 4)}
    norm = dl.FunctionalBatchMetricCallback(torch.mean, input_key="norms", target_key=[], metric_key="norm")

    metrics = Doubles(model, "cpu").evaluate_loader(loaders["valid"], criterion=nn.CrossEntropyLoss(), callbacks=[norm])

    features, targets = classification(8).tensors
    logits = model.eval()(2 * features)
    assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), abs=1e-6)
    assert metrics["norm"] == pytest.approx(logits.norm(dim=1).mean().item(), abs=1e-6)
    predicted = [each["logits"] for each in Doubles(model, "cpu").predict_loader(loaders["valid"])]
    assert torch.allclose(torch.cat(predicted), logits)


class Made(dl.SupervisedRunner):
    def get_model(self, stage):
        return mlp(dropout=0.5)


@pytest.mark.parametrize("runner", [dl.SupervisedRunner(mlp(dropout=0.5)), Made()], ids=["passed", "get_model"])
def test_predict_loader_yields_what_predict_batch_gives(runner):
    """predict_loader predicts in eval mode without gradients and does not change the caller's gradient mode."""
    predictions = []
    for prediction in runner.predict_loader(loader=loader(10, 4), cpu=True):
        assert torch.is_grad_enabled()
        predictions.append(prediction["logits"])

    features, _ = classification(10).tensors
    assert not predictions[0].requires_grad
    torch.testing.assert_close(torch.cat(predictions), mlp().eval()(features).detach())


class OwnLoss(dl.Runner):
    def handle_batch(self, batch):
        features, targets = batch
        self.batch_metrics["loss"] = self.criterion(self.model(features), targets)


@pytest.mark.parametrize("engine", [dl.CPUEngine(), dl.DistributedDataParallelEngine(2, device="cpu")])
def test_a_model_that_was_not_trained_here_is_evaluated_by_a_criterion(engine):
    """evaluate_loader(criterion=) adds the mean loss over samples; the runner's criterion and weights stay."""
    model, data, criterion = mlp(), loader(21, 4), nn.CrossEntropyLoss()
    features, targets = classification(21).tensors
    logits, before = model.eval()(features), weights(model)
    runner, accuracy = dl.SupervisedRunner(model), [dl.AccuracyCallback("logits", "targets")]

    alone = runner.evaluate_loader(data, criterion=criterion, engine=engine)
    beside = runner.evaluate_loader(data, callbacks=accuracy, criterion=criterion, engine=engine)
    own = OwnLoss(model).evaluate_loader(data, criterion=criterion, engine=engine)

    assert alone == own == {"loss": pytest.approx(nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)}
    assert beside["loss"] == alone["loss"]
    assert beside["accuracy"] == pytest.approx((logits.argmax(1) == targets).double().mean().item(), abs=1e-6)
    assert runner.criterion is None and torch.equal(weights(model), before)


def test_a_criterion_that_sums_is_evaluated_without_a_warning_about_gradients(caplog):
    dl.SupervisedRunner(mlp()).evaluate_loader(loader(8, 4), criterion=nn.CrossEntropyLoss(reduction="sum"), cpu=True)

    assert not caplog.records


def test_a_criterion_takes_the_place_of_that_of_training():
    """evaluate_loader(criterion=) replaces the runner's criterion for one evaluation."""
    runner = train()
    trained_with = runner.criterion

    smoothed = runner.evaluate_loader(loader(21, 4), criterion=nn.CrossEntropyLoss(label_smoothing=0.5), cpu=True)

    assert smoothed["loss"] != runner.evaluate_loader(loader(21, 4), cpu=True)["loss"]
    assert runner.criterion is trained_with


def halving(optimizer):
    """Return a scheduler without a base class."""

    def step():
        optimizer.param_groups[0]["lr"] /= 2

    return SimpleNamespace(optimizer=optimizer, step=step, state_dict=dict, load_state_dict=lambda state: None)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5), [0.1, 0.05, 0.025]),
        (lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda _: 0.1), [0.1, 0.01, 0.001]),
        (halving, [0.1, 0.05, 0.025]),
    ],
)
def test_a_scheduler_of_any_class_is_stepped_once_an_epoch(make, expected):
    """A scheduler of any class is stepped once per epoch, and the logged learning rate is that of the epoch."""
    model = mlp()
    optimizer = sgd(model)

    runner = train(model, optimizer=optimizer, scheduler=make(optimizer), num_epochs=3)

    rates = [runner.experiment_metrics[epoch]["train"]["lr"] for epoch in (1, 2, 3)]
    assert rates == pytest.approx(expected)


def test_one_cycle_follows_the_optimizers_steps():
    """OneCycleLR is stepped once per optimizer step, not per batch, with gradient accumulation."""
    model = mlp()
    optimizer, by_hand = sgd(model), sgd(mlp())
    scheduler, expected = (
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.5, total_steps=11) for each in (optimizer, by_hand)
    )

    accumulate = [dl.OptimizerCallback("loss", accumulation_steps=2)]
    loaders = {"train": loader(40, 4)}
    train(model, optimizer=optimizer, scheduler=scheduler, num_epochs=2, loaders=loaders, callbacks=accumulate)
    for _ in range(10):
        by_hand.step()
        expected.step()

    assert scheduler.get_last_lr() == expected.get_last_lr()


def test_a_stop_wanted_at_a_loaders_end_ends_the_stage_and_not_the_next_loader():
    """need_early_stop set at a loader's end ends the stage after the epoch's remaining loaders."""
    counts = []

    def stop(runner):
        counts.append((runner.loader_key, runner.loader_batch_step))
        runner.need_early_stop = runner.need_early_stop or runner.loader_key == "train"

    runner = supervised(num_epochs=5, callbacks=[at("on_loader_end", stop)])

    assert counts == [("train", 10), ("valid", 5)] and runner.epoch_step == 1


def test_supervised_runner_trains_with_overridden_hooks():
    """Criterion, optimizer and scheduler can come from get_* methods instead of arguments."""

    class Hooks(dl.SupervisedRunner):
        def get_criterion(self, stage):
            return nn.CrossEntropyLoss()

        def get_optimizer(self, stage, model):
            return sgd(model)

        def get_scheduler(self, stage, optimizer):
            return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    model, reference = mlp(), mlp()
    runner = train(model, runner=Hooks(), criterion=None, optimizer=None, num_epochs=2)
    optimizer = sgd(reference)
    for lr in (0.1, 0.05):
        optimizer.param_groups[0]["lr"] = lr
        train_by_hand(reference, optimizer, loader(16, 4))

    assert torch.equal(weights(model), weights(reference))
    assert runner.epoch_metrics["train"]["lr"] == 0.05


@pytest.mark.parametrize(("is_stream", "kept"), [(True, 20), (False, 8)], ids=["a stream", "ended early"])
def test_accumulated_gradients_at_a_loaders_end(is_stream, kept):
    """The end of a stream of unknown length makes a last step; a loader that ends early drops what waits for one."""

    model, reference = mlp(), mlp()
    data = torch.utils.data.DataLoader(Stream(classification(20)), batch_size=4) if is_stream else loader(40, 4)
    accumulate = [dl.OptimizerCallback("loss", accumulation_steps=2)]
    train(model, loaders={"train": data}, callbacks=accumulate, check=not is_stream)
    features, targets = classification(kept).tensors
    train_by_hand(reference, sgd(reference), zip(features.split(8), targets.split(8), strict=True))

    torch.testing.assert_close(weights(model), weights(reference), rtol=0, atol=1e-6)


def test_evaluate_loader_uses_its_own_loader_and_trains_nothing():
    """evaluate_loader ignores the runner's get_* hooks and keeps its metrics and counters."""

    class Hooks(dl.SupervisedRunner):
        def get_loaders(self, stage):
            return {"train": loader(40, 4), "valid": loader(8, 4)}

        def get_optimizer(self, stage, model):
            return sgd(model)

    model = mlp()
    runner = train(model, runner=Hooks(), optimizer=None)
    trained, metrics = weights(model), dict(runner.epoch_metrics)

    loss = runner.evaluate_loader(loader(30, 4, seed=5))["loss"]

    features, targets = classification(30, seed=5).tensors
    assert loss == pytest.approx(nn.functional.cross_entropy(model.eval()(features), targets).item(), rel=1e-6)
    assert torch.equal(weights(model), trained)
    assert (runner.epoch_metrics, runner.batch_step) == (metrics, 10)


def test_a_step_on_scaled_gradients_by_hand_is_refused():
    """optimizer.step() on gradients scaled for fp16 raises an error that names the correct call."""

    class ByHand(dl.Runner):
        def handle_batch(self, batch):
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.optimizer.zero_grad()
            self.engine.backward(loss)
            self.optimizer.step()

    with pytest.raises(RuntimeError, match=r"call self.engine.step\(optimizer\), not optimizer.step\(\)"):
        supervised(ByHand(), criterion=None, loaders={"train": loader(8, 4)}, fp16=True)


def test_engine_flags_hold_for_one_call_and_contradict_a_given_engine():
    """Engine flags apply to one call of train() and raise an error with an engine from the constructor."""
    runner = train(amp=True)
    assert isinstance(runner.engine.precision, dl.AMP)

    train(runner=runner)
    assert isinstance(runner.engine.precision, dl.FP32)

    with pytest.raises(ValueError, match="engine=CPUEngine and amp=True contradict"):
        dl.SupervisedRunner(engine=dl.CPUEngine()).train(model=mlp(), amp=True)


def test_each_callback_hears_the_experiment_and_loggers_are_opened_once_in_two_stages():
    """on_experiment_start and on_experiment_end come once, whatever the callback's stage; so does a logger's setup."""
    log = []

    class Opening(dl.ILogger):
        def setup(self, *, resumed_at=None):
            log.append("open")

        def log_scalars(self, scalars, *, step, scope):
            pass

    class Note(dl.Callback):
        def __init__(self, stage):
            super().__init__()
            self.on_experiment_start = lambda runner: log.append(f"start {stage}")
            self.on_experiment_end = lambda runner: log.append(f"end {stage}")

    class Two(Minimal):
        stages = ("one", "two")

        def get_loggers(self):
            return {"opening": Opening()}

        def get_callbacks(self, stage):
            return {"note": Note(stage), "worker": dl.Callback(node=dl.CallbackNode.Worker)}

    Two().run()

    assert log.count("open") == 1
    assert [each for each in log if each != "open"] == ["start one", "start two", "end one", "end two"]


def test_plateau_rests_in_epochs_without_its_loader():
    """ReduceLROnPlateau is stepped with the validation loss, and not in epochs without that loader."""
    model = mlp()
    optimizer = sgd(model)
    seen = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            seen.append(metrics)
            super().step(metrics)

    periodic = [dl.PeriodicLoaderCallback(monitor="valid/loss", mode="min", valid=2)]
    runner = supervised(
        model=model, optimizer=optimizer, scheduler=Plateau(optimizer), num_epochs=4, callbacks=periodic
    )

    assert seen == [runner.experiment_metrics[epoch]["valid"]["loss"] for epoch in (2, 4)]


class Meters(dl.SupervisedRunner):
    """Runner that overrides an event, whose bound method refers to it."""

    def on_epoch_end(self, runner):
        super().on_epoch_end(runner)


@pytest.mark.parametrize("kind", [dl.SupervisedRunner, Meters])
@pytest.mark.parametrize("evaluates", [False, True], ids=["trained", "evaluated"])
def test_loaders_are_freed_with_the_last_reference(kind, evaluates):
    """No circle of references keeps them, because persistent workers live as long as their loader."""
    kept = []

    def run():
        runner, its_loader = kind(), loader(8, 4)
        if evaluates:
            runner.evaluate_loader(its_loader, model=mlp(), criterion=nn.CrossEntropyLoss(), engine=dl.CPUEngine())
            kept.append(runner)
        else:
            train(runner=runner, loaders={"train": its_loader})
        return weakref.ref(its_loader.dataset)

    run()  # torch's first optimizer leaves a traceback that holds this frame
    gc.collect()
    gc.disable()
    try:
        reference = run()
        left = reference()
    finally:
        gc.enable()

    assert left is None


class Dispatches(dl.Runner):
    """Runner that keeps bound methods and a lock, which pickles leave out."""

    def __init__(self):
        super().__init__()
        self.steps = {"train": self.compute, "valid": self.compute}
        self.lock = threading.Lock()

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def compute(self, batch):
        features, targets = batch
        self.batch_metrics["loss"] = self.criterion(self.model(features), targets)

    def handle_batch(self, batch):
        with self.lock:
            self.steps[self.loader_key](batch)


def test_an_evaluation_runs_on_the_runner_itself():
    """Bound methods and callbacks refer to the runner, which has all its attributes again afterwards."""
    runner, seen = Dispatches(), []
    keeper = at("on_experiment_start", seen.append)
    model, criterion = mlp(), nn.CrossEntropyLoss()
    before = dict(vars(runner))

    metrics = runner.evaluate_loader(loader(8, 4), callbacks=[keeper], model=model, criterion=criterion, cpu=True)

    assert metrics.keys() == {"loss"} and seen[0] is runner
    assert vars(runner) == before


def test_a_copy_of_a_runner_trains_its_own_model():
    """The copy has its own model, optimizer and callbacks, and its run leaves the original's place alone."""
    model, runner = mlp(), dl.SupervisedRunner()
    train(model, runner=runner, loaders={"train": loader(8, 4)})
    before = weights(model)

    runner.batch, runner.batch_metrics = None, {}  # torch does not copy tensors that are parts of a graph
    copied = copy.deepcopy(runner)
    copied.run()

    assert torch.equal(weights(model), before) and not torch.equal(weights(copied.model), before)
    assert copied.current_run.resume_point is not runner.current_run.resume_point


def test_a_copy_of_a_runner_has_its_monitor():
    """A run of the copy tells the scheduler the same metric, without a logdir."""
    model = mlp()
    optimizer = sgd(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
    loaders = {"train": loader(8, 4), "valid": loader(8, 4)}
    accuracy = dl.AccuracyCallback("logits", "targets")
    options = {"monitor": "valid/accuracy", "mode": "max", "callbacks": [accuracy], "loaders": loaders}
    runner = train(model, optimizer=optimizer, scheduler=plateau, **options)

    runner.batch, runner.batch_metrics = None, {}
    copied = copy.deepcopy(runner)
    copied.run()

    assert copied.current_run.monitor == Monitor("valid", "accuracy", minimize=False)
    values = [each.epoch_metrics["valid"]["accuracy"] for each in (runner, copied)]
    assert copied.scheduler.best == max(values) and plateau.best == values[0]
