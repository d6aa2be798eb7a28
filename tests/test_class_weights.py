"""Criteria that divide by class weights, or by the targets that are not ignored: exact with a batch weight."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests.tiny import classification, mlp, sgd, train, weights

CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.25], dtype=torch.float64)
EXACT = {"rtol": 0, "atol": 1e-12}


def data(*, ignored=None):
    """Return samples of which every fourth has the target that is ignored, if one is."""
    features, targets = classification(46).tensors
    targets[::2], targets[3::4] = 0, 2  # no batch of two has only targets of class 1
    if ignored is not None:
        targets[1::4] = ignored
    return TensorDataset(features.double(), targets)


class Weighted(dl.SupervisedRunner):
    """The recipe of docs/data.md: a batch weighs what its loss was divided by."""

    def handle_batch(self, batch):
        super().handle_batch(batch)
        targets = batch["targets"]
        targets = targets[targets != self.criterion.ignore_index]
        weight = self.criterion.weight
        self.batch_weight = len(targets) if weight is None else weight[targets].sum()


def trained(runner, samples, criterion, *, batch_size=4, **options):
    loaders = {"train": DataLoader(samples, batch_size)}
    train(mlp().double(), runner=runner, criterion=criterion, loaders=loaders, **options)
    return weights(runner.model), runner.epoch_metrics["train"]["loss"]


def by_hand(samples, criterion, *, step_size):
    """Train with a hand-written loop over the global batches; return the weights and the mean of all losses."""
    model = mlp().double()
    optimizer, total, count = sgd(model), 0.0, 0.0
    for start in range(0, len(samples), step_size):
        features, targets = samples[start : start + step_size]
        optimizer.zero_grad()
        loss = criterion(model(features), targets)
        loss.backward()
        optimizer.step()
        kept = targets[targets != criterion.ignore_index]
        share = float(len(kept) if criterion.weight is None else criterion.weight[kept].sum())
        total, count = total + loss.item() * share, count + share
    return weights(model), total / count


CRITERIA = {
    "class weights": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), None),
    "smoothed": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1), None),
    "ignored targets": (nn.CrossEntropyLoss(), -100),
    "both": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=1), None),
}
SPLITS = [
    {"accumulation_steps": 3},
    pytest.param({"num_processes": 2, "batch_size": 6}, marks=pytest.mark.slow),  # starts processes
    pytest.param({"num_processes": 2, "batch_size": 2, "accumulation_steps": 3}, marks=pytest.mark.slow),
]


class Wrapped(nn.Module):
    """A criterion of the user around one of torch."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, logits, targets):
        return self.loss(logits, targets)


class OwnLoss(dl.Runner):
    """A runner that keeps its loss itself."""

    def __init__(self):
        super().__init__()
        self.weighted = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)

    def get_callbacks(self, stage):
        steps = {"backward": dl.BackwardCallback("loss"), "optimizer": dl.OptimizerCallback("loss")}
        return super().get_callbacks(stage) | steps

    def handle_batch(self, batch):
        self.batch_metrics["loss"] = self.weighted(self.model(batch[0]), batch[1])


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CRITERIA)
def test_a_batch_weight_makes_such_losses_exact(name, split):
    """Steps and the logged loss are those of the global batch, also where the last step is short."""
    criterion, ignored = CRITERIA[name]
    samples = data(ignored=ignored)

    found, loss = trained(Weighted(), samples, criterion, **split)

    expected, mean = by_hand(samples, criterion, step_size=12)
    torch.testing.assert_close(found, expected, **EXACT)
    assert loss == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize(
    ("criterion", "settings", "words"),
    [
        (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), {"accumulation_steps": 2}, "CrossEntropyLoss(weight=...)"),
        ({"a": nn.CrossEntropyLoss(ignore_index=2)}, {"accumulation_steps": 2}, "CrossEntropyLoss(ignore_index=2)"),
        (nn.CrossEntropyLoss(), {"accumulation_steps": 2, "ignored": -100}, "CrossEntropyLoss(ignore_index=-100)"),
        (Wrapped(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)), {"accumulation_steps": 2}, "CrossEntropyLoss(weight=...)"),
        (Wrapped(nn.CrossEntropyLoss()), {"accumulation_steps": 2, "ignored": -100}, "ignore_index=-100"),
        (partial(cross_entropy, weight=CLASS_WEIGHTS), {"accumulation_steps": 2}, "cross_entropy(weight=...)"),
        (cross_entropy, {"accumulation_steps": 2, "ignored": -100}, "cross_entropy(ignore_index=-100)"),
        (None, {"accumulation_steps": 2, "runner": OwnLoss()}, "CrossEntropyLoss(weight=...)"),
        (partial(cross_entropy, label_smoothing=0.1), {"accumulation_steps": 2}, None),
        (nn.CrossEntropyLoss(), {"accumulation_steps": 2}, None),
        (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), {}, None),
        (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), {"accumulation_steps": 2, "runner": Weighted()}, None),
        (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, reduction="sum"),
         {"accumulation_steps": 2, "loss_reduction": "sum"}, None),
        (nn.MultiMarginLoss(weight=CLASS_WEIGHTS), {"accumulation_steps": 2}, None),  # divides by the samples
    ],
)  # fmt: skip
def test_such_losses_are_warned_about_where_the_weight_matters(criterion, settings, words, caplog):
    """Once in a run, with what to set; not if a step is one batch of one process, or a batch weight is set."""
    settings = {"num_epochs": 2, "runner": dl.SupervisedRunner(), **settings}
    callbacks = [dl.CriterionCallback("logits", "targets", criterion_key="a")] if isinstance(criterion, dict) else []

    samples = data(ignored=settings.pop("ignored", None))
    trained(settings.pop("runner"), samples, criterion, callbacks=callbacks, **settings)

    assert [each for each in caplog.messages if "batch_weight" in each] == caplog.messages
    assert len(caplog.messages) == (words is not None)
    assert words is None or (words in caplog.text and "docs/data.md" in caplog.text)


@pytest.mark.slow  # starts processes
def test_two_processes_warn_once(capfd):
    train(criterion=nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.float()), num_processes=2)

    assert capfd.readouterr().err.count("CrossEntropyLoss(weight=...)") == 1
