"""What is tried on a copy of a runner leaves the runner as it was."""

import threading
from collections import Counter

import torch
from torch import nn

from runnerkit import dl
from runnerkit.metrics import AdditiveMetric
from runnerkit.scratch_runner import scratch_copy
from tests.tiny import classification, loader, mlp, quiet, sgd


class Keeps(dl.SupervisedRunner):
    """One of each that a user may keep."""

    def __init__(self):
        super().__init__()
        self.count, self.names, self.classes = 0, [], Counter()
        self.total, self.nested = torch.zeros(2), {"meters": [AdditiveMetric()]}
        self.module = nn.BatchNorm1d(2)  # sums in buffers, as a torchmetrics object has them
        self.teacher, self.data, self.lock = mlp(), classification(8), threading.Lock()


class Remembers(dl.Callback):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = []


def trained():
    runner, model = Keeps(), mlp()
    runner.head = model[-1]
    return runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={"train": loader(8, 4)},
        callbacks={"metric": dl.ControlFlowCallback(Remembers(order=20), epochs=1), "last": Remembers()},
        cpu=True,
        **quiet(),
    )


def test_meters_of_any_kind_stay_as_they_were():
    """Numbers, lists, counters, tensors changed in place, objects however deep, callbacks' state."""
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
    """So that a copy costs little: no model, teacher's weights among them, and no data set twice."""
    runner = trained()
    scratch = scratch_copy(runner, callbacks=[runner.callbacks["metric"]])

    for name in ("model", "optimizer", "criterion", "engine", "loader", "data", "lock", "head"):
        assert getattr(scratch, name) is getattr(runner, name), name
    assert all(map(torch.Tensor.is_set_to, scratch.teacher.parameters(), runner.teacher.parameters()))
    assert scratch.loaders["train"] is runner.loaders["train"]
    assert scratch._loaders["train"] is runner._loaders["train"]
    assert scratch.callbacks["last"] is runner.callbacks["last"]
