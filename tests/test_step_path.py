"""Tests that shortcuts of the step keep the user's batches, keys, types and callbacks working."""

from enum import StrEnum

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.metrics.classification import topk_hits
from runnerkit.metrics.first_non_finite import FirstNonFinite
from runnerkit.metrics.means import LoaderMeans
from tests.interrupt import at
from tests.tiny import loader, mlp, sgd, train


def fit(*, batches=None, model=None, **options):
    return train(model, **{"loaders": {"train": batches or loader(16, 4)}, **options})


@pytest.mark.parametrize("value", [torch.tensor(3), torch.tensor(True), torch.tensor(1.5, dtype=torch.bfloat16)])
def test_the_first_batch_that_is_not_finite_is_found_beside_metrics_of_any_type(value):
    """The first non-finite batch is found with metrics of any dtype, even beyond the range of float16."""
    for more in ({}, {"loss": torch.tensor(0.5)}):
        means = LoaderMeans(FirstNonFinite())
        for step in range(1, 3):
            means.update({"n": value, **more}, 4, batch_step=step)
        assert means.first_non_finite.find(rank=0) is None
    means = LoaderMeans(FirstNonFinite())
    means.update({"n": torch.tensor(1.0, dtype=torch.float16)}, 4, batch_step=70_000)
    means.update({"n": torch.tensor(float("nan"), dtype=torch.float16)}, 4, batch_step=70_001)
    assert means.first_non_finite.find(rank=0) == (70_001, 0, "n")


def test_accuracy_of_one_k_does_not_depend_on_the_others():
    """Top-k hits of one k do not depend on the other k, even with equal scores in half precision."""
    logits = torch.randn(512, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = logits.float().argmax(1)
    assert [int(topk_hits(logits, targets, topk)[0]) for topk in ((1,), (1, 3), (1, 5))] == [512] * 3
    assert int(topk_hits(logits, targets, (1, 3))[1]) == int(topk_hits(logits, targets, (3, 5))[0])


def test_keys_set_after_the_constructor_are_those_that_count():
    """`input_key` can be changed after the constructor, for example by a subclass."""

    class Images(dl.SupervisedRunner):
        def __init__(self):
            super().__init__()
            self.input_key = "image"

    data = [{"image": features, "targets": targets} for features, targets in loader(16, 4)]
    assert fit(batches=data, runner=Images()).epoch_metrics["train"]["loss"] > 0


def test_keys_may_be_an_enum_of_strings():
    """Batch keys may be members of a StrEnum."""

    class Key(StrEnum):
        logits = "logits"

    metrics = fit(callbacks=[dl.AccuracyCallback(Key.logits, "targets")]).epoch_metrics["train"]
    assert 0 <= metrics["accuracy"] <= 1


@pytest.mark.parametrize("many", [False, True])
def test_an_empty_key_names_the_only_component(many):
    """The key "" selects the only criterion or optimizer, passed alone or in a dict."""
    model = mlp(dropout=0.0)
    callbacks = [
        dl.CriterionCallback("logits", "targets", criterion_key=""),
        dl.BackwardCallback("loss"),
        dl.OptimizerCallback("loss", optimizer_key=""),
    ]
    criterion, optimizer = nn.CrossEntropyLoss(), sgd(model)
    if many:
        criterion, optimizer = {"": criterion}, {"": optimizer}
    fit(model=model, criterion=criterion, optimizer=optimizer, callbacks=callbacks)


def test_callbacks_that_are_switched_on_within_a_loader_work_from_there():
    """Criterion and metric callbacks that are enabled within a loader work although they missed on_loader_start."""
    accuracy = dl.CallbackWrapper(dl.AccuracyCallback("logits", "targets"), enable_callback=False)
    second = dl.CriterionCallback("logits", "targets", metric_key="second")
    wrapped = dl.CallbackWrapper(second, enable_callback=False)

    def switch(runner):
        if runner.loader_batch_step == 3:
            accuracy.enable_callback = wrapped.enable_callback = True

    first = dl.CriterionCallback("logits", "targets")
    metrics = fit(callbacks=[at("on_batch_start", switch), first, accuracy, wrapped]).epoch_metrics["train"]
    assert "accuracy" in metrics and "second" in metrics


def test_an_evaluation_within_a_loader_leaves_its_sums_alone():
    """evaluate_loader called within a training loader does not change its sums."""

    def evaluate(runner):
        if runner.loader_batch_step == 2:
            runner.evaluate_loader(loader(8, 4))

    plain, beside = (
        fit(callbacks=[dl.AccuracyCallback("logits", "targets"), *more]).epoch_metrics["train"]
        for more in ([], [at("on_step_end", evaluate)])
    )
    assert beside["accuracy"] == plain["accuracy"]


def test_a_metric_is_averaged_where_its_callback_does_not_act():
    """A runner's metric with the name of a callback's is averaged in loaders where the callback is inactive."""

    class Own(dl.SupervisedRunner):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            self.batch_metrics["accuracy"] = 7.0

    only_train = dl.ControlFlowCallback(dl.AccuracyCallback("logits", "targets"), loaders="train")
    runner = fit(runner=Own(), callbacks=[only_train], loaders={"train": loader(16, 4), "valid": loader(8, 4)})
    assert runner.epoch_metrics["valid"]["accuracy"] == 7.0
    assert 0 <= runner.epoch_metrics["train"]["accuracy"] <= 1


def test_a_validation_within_a_loader_is_a_pass_of_its_own():
    """The pass around it is the same object afterwards, with its sums, its steps and what shows it in the runner."""
    passes = []

    def note(runner):
        current = runner.loader_pass
        assert current.key == runner.loader_key and current.gradient_step is runner.gradient_step
        passes.append((current, current.means.num_samples, runner.loader_batch_step))

    loaders = {"train": loader(16, 4), "valid": loader(8, 4), "infer": loader(4, 4)}
    fit(callbacks=[at("on_batch_start", note)], loaders=loaders, valid_every_steps=2)

    assert len({id(current) for current, *_ in passes}) == 5
    trained = [(current, *rest) for current, *rest in passes if current.key == "train"]
    assert len({id(current) for current, *_ in trained}) == 1
    assert [rest for _, *rest in trained] == [[0, 1], [4, 2], [8, 3], [12, 4]]
