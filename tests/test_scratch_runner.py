"""Tests that changes to a scratch copy of a runner do not affect the runner."""

import threading
from collections import Counter

import torch
from torch import nn

from runnerkit import dl
from runnerkit.metrics.means import AdditiveMetric
from runnerkit.passes.scratch_runner import scratch_copy
from tests.tiny import classification, mlp, train


class Keeps(dl.SupervisedRunner):
    def __init__(self):
        super().__init__()
        self.count, self.names, self.classes = 0, [], Counter()
        self.total, self.nested = torch.zeros(2), {"meters": [AdditiveMetric()]}
        self.module = nn.BatchNorm1d(2)  # with buffers, like a torchmetrics object
        self.teacher, self.data, self.lock = mlp(), classification(8), threading.Lock()


class Remembers(dl.Callback):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = []


def trained():
    runner, model = Keeps(), mlp()
    runner.head = model[-1]
    callbacks = {"metric": dl.ControlFlowCallback(Remembers(order=20), epochs=1), "last": Remembers()}
    return train(model, runner=runner, callbacks=callbacks)


def test_meters_of_any_kind_stay_as_they_were():
    """Numbers, lists, counters, tensors, nested objects and callback states of the runner are not shared."""
    runner = trained()
    scratch = scratch_copy(runner, callbacks=[runner.callbacks["metric"]])

    scratch.count += 1
    scratch.names.append("one")
    scratch.classes["cat"] += 1
    scratch.total += 1
    scratch.nested["meters"][0].update(3.0, num_samples=2)
    scratch.module(torch.ones(4, 2))
    scratch.callbacks["metric"].callback.seen.append(1)

    assert (runner.count, runner.names, runner.classes) == (0, [], Counter())
    assert runner.total.tolist() == [0, 0]
    assert runner.nested["meters"][0].num_samples == runner.module.num_batches_tracked == 0
    assert runner.callbacks["metric"].callback.seen == []


def test_weights_data_and_what_cannot_be_copied_are_shared():
    """Weights, data sets, loaders and objects that cannot be copied are shared, so that a copy is cheap."""
    runner = trained()
    scratch = scratch_copy(runner, callbacks=[runner.callbacks["metric"]])

    for name in ("model", "optimizer", "criterion", "engine", "loader", "data", "lock", "head"):
        assert getattr(scratch, name) is getattr(runner, name), name
    assert all(map(torch.Tensor.is_set_to, scratch.teacher.parameters(), runner.teacher.parameters()))
    assert scratch.loaders["train"] is runner.loaders["train"]
    assert scratch._given.loaders["train"] is runner._given.loaders["train"]
    assert scratch.callbacks["last"] is runner.callbacks["last"]
