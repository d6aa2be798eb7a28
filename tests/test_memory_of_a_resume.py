"""Tests of the memory of a resumed run, the broadcast of its state and the transfer of its results."""

import gc
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from runnerkit import dl
from runnerkit.loop import run_result
from runnerkit.resume.state_broadcast import broadcast_state
from runnerkit.support import pickling
from tests.tiny import classification, mlp, train

SHAPE = (16, 6)  # of the first layer's weight


class CountTensors(dl.Callback):
    """Counts the tensors of SHAPE on every rank at the start of each epoch."""

    def __init__(self):
        super().__init__(dl.CallbackOrder.External)
        self.counts = []

    def on_epoch_start(self, runner):
        gc.collect()
        runner.optimizer.zero_grad()
        mine = {each.data_ptr() for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)
                and each.shape == SHAPE}  # fmt: skip
        self.counts.append(runner.engine.gather_object(len(mine)))


@pytest.mark.parametrize("options", [{"cpu": True}, {"cpu": True, "ddp": True}], ids=["alone", "two processes"])
def test_a_resumed_run_holds_weights_and_momentum_once(tmp_path, options):
    """A resumed run holds as many tensors as an uninterrupted run in its second epoch."""
    gc.collect()
    gc.freeze()  # objects of other tests, which each collection would visit

    def fit(logdir, num_epochs):
        model, count = mlp(), CountTensors()
        train(model, callbacks=[count], logdir=logdir, resume="auto", num_epochs=num_epochs, **options)
        return count.counts

    expected = fit(tmp_path / "whole", 2)[1]
    fit(tmp_path / "log", 1)
    [counts] = fit(tmp_path / "log", 2)
    assert all(count <= most for count, most in zip(counts, expected, strict=True))


def test_a_state_is_broadcast_in_parts_and_arrives_as_it_was():
    """No message is much larger than a part or one tensor; views are sent without their base, shared tensors once."""
    whole = torch.arange(100_000.0)
    state = {"a": whole[:10], "b": whole, "again": whole, "lr": 0.1, "empty": torch.empty(0)}
    state["few"] = [torch.zeros(1000)] * 2
    sent = []
    zero = SimpleNamespace(
        num_processes=2, is_main_process=True, broadcast_object=lambda v: sent.append(pickle.dumps(v)) or v
    )
    one = SimpleNamespace(num_processes=2, is_main_process=False, broadcast_object=lambda _: pickle.loads(sent.pop(0)))

    assert broadcast_state(state, zero, part_bytes=5000) is state
    sizes = [len(each) for each in sent]
    received = broadcast_state(None, one, part_bytes=5000)

    assert sorted(sizes)[-1] < whole.nbytes + 2000 and sorted(sizes)[-2] < 8000 and not sent
    assert received["again"] is received["b"] and received["few"][0] is received["few"][1]
    assert received.keys() == state.keys() and received["lr"] == 0.1
    for name in ("a", "b", "empty"):
        assert torch.equal(received[name], state[name])


class Pickled:
    count = 0

    def __getstate__(self):
        Pickled.count += 1
        return {}


class Data(Pickled, Dataset):
    pass


def test_what_comes_back_is_pickled_once_and_data_that_was_there_before_is_not():
    """Results include data created by a hook but no earlier data sets; shared attributes stay one object."""
    Pickled.count = 0
    runner = dl.SupervisedRunner(mlp())
    runner.data, runner.by_key = Data(), {"train": Data()}
    had = run_result.data_of(vars(runner))
    runner.made, runner.mine, runner.shared = classification(8), Pickled(), []
    runner.same = runner.shared

    back = pickling.loads(pickling.dumps(run_result.RunResult.of(runner, had=had))).attributes

    assert Pickled.count < 3, "data sets that were there before do not travel"
    assert "data" not in back and "by_key" not in back and len(back["made"]) == 8
    assert back["same"] is back["shared"]
