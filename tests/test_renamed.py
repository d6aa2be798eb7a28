"""Tests of the errors for arguments that Catalyst has under another name."""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl, metrics
from runnerkit.support.arguments import RENAMED

CASES = [(kind, name, today) for kind, names in RENAMED.items() if kind != "IEngine" for name, today in names.items()]


@pytest.mark.parametrize(("kind", "name", "today"), CASES)
def test_a_renamed_argument_is_explained(kind, name, today):
    """The error names the class, the argument and today's argument, which exists, or what to do."""
    described = getattr(metrics if kind.endswith("Metric") else dl, kind)
    parameters = inspect.signature(described).parameters
    advice = f"use {today!r}" if today.isidentifier() else today

    with pytest.raises(TypeError, match=re.escape(f"{kind} does not take {name!r}: {advice}")):
        described(**{name: 1})

    assert name not in parameters
    assert not today.isidentifier() or today in parameters


@pytest.mark.parametrize(("name", "today"), RENAMED["IEngine"].items())
@pytest.mark.parametrize("engine", [dl.CPUEngine, dl.DistributedDataParallelEngine, dl.DataParallelEngine])
def test_a_renamed_argument_of_an_engine_is_explained(engine, name, today):
    """Engines share one part of the table."""
    if name in inspect.signature(engine).parameters:
        pytest.skip("this engine has the argument")
    with pytest.raises(TypeError, match=re.escape(f"{engine.__name__} does not take {name!r}: ")) as raised:
        engine(**{name: 1})
    assert today in str(raised.value)


def test_classes_of_users_keep_their_arguments():
    """A subclass of the same name may have an argument of an old name, and signatures are the classes' own."""

    class AccuracyCallback(dl.AccuracyCallback):
        def __init__(self, topk_args):
            super().__init__("logits", "targets", topk=topk_args)

    assert AccuracyCallback(topk_args=(1, 3)).metric.topk == (1, 3)
    assert "topk" in inspect.signature(dl.AccuracyCallback).parameters


def test_device_and_other_names_of_21_12():
    """`runner.device`, `engine.sync_device` and `engine.is_master_process`."""

    class Runner(dl.Runner):
        def handle_batch(self, batch):
            seen.append((self.device, self.engine.is_master_process, self.engine.sync_device(batch)))

    seen = []
    data = TensorDataset(torch.ones(2, 3))
    Runner().evaluate_loader(DataLoader(data, batch_size=2), model=nn.Linear(3, 1), engine=dl.CPUEngine())

    assert seen[0][:2] == (torch.device("cpu"), True)
    torch.testing.assert_close(seen[0][2], [torch.ones(2, 3)])
    module = nn.Linear(1, 1)
    assert dl.CPUEngine().sync_device(module) is module


def test_orders_and_nodes_have_catalysts_names():
    """Scripts write ``dl.CallbackOrder.internal`` and ``dl.CallbackNode.all``."""
    assert dl.CallbackOrder.metric_aggregation is dl.CallbackOrder.MetricAggregation
    assert dl.CallbackOrder.external_extra == dl.CallbackOrder.ExternalExtra == 120
    for kind in (dl.CallbackOrder, dl.CallbackNode):
        lower_case = {name.replace("_", "") for name in kind.__members__ if name.islower()}
        assert lower_case == {each.name.lower() for each in kind}
