"""Functions sent to other processes: a part that cannot be sent is named by its path."""

import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.engines.launch.payload import pack, remove_files, unpack
from tests.tiny import train

LOCK = threading.Lock()


class Holder:
    def __init__(self):
        self.parts = [1, threading.Lock()]

    def method(self):
        return self.parts


def closure():
    lock = threading.Lock()
    return lambda: lock


def with_a_global():
    return LOCK


with_a_global.__module__ = "__main__"  # pickled by value, with the globals it uses


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (partial(print, threading.Lock()), "runner"),
        (partial(print, file={"a": threading.Lock()}), r"runner -> file\['a'\]"),
        (Holder().method, r"runner\.parts\[1\]"),
        (closure(), "runner -> lock"),
        (with_a_global, "runner -> LOCK"),
    ],
    ids=["a partial's argument", "a partial's keyword", "a method's object", "a closure", "a global"],
)
def test_what_cannot_be_sent_is_named_by_its_path(tmp_path, value, path):
    """Paths lead through partials, methods and functions, and the error says what to do."""
    with pytest.raises(TypeError, match=rf"^{path} is a lock and cannot be sent .*create it where it is used"):
        pack(value, tmp_path / "payload")


def test_objects_that_refer_to_each_other_are_searched_once(tmp_path):
    """An attempt for each path of references, of which there are billions here, would never end."""
    agents = [SimpleNamespace(number=number) for number in range(14)]
    for each in agents:
        each.peers = agents
    owner = SimpleNamespace(agents=agents, lock=threading.Lock())
    for each in agents:
        each.owner = owner

    with pytest.raises(TypeError, match=r"^runner\.lock is a lock"):
        pack(owner, tmp_path / "payload")


def there_and_back(value, folder):
    pack(value, folder / "payload")
    return unpack(folder / "payload")


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["in the pickle", "beside it"])
def test_tensors_and_arrays_arrive_as_they_were(tmp_path, size):
    """Values of any layout and dtype, read-only ones and parameters are equal, and writing to a copy stays there."""
    tensor = torch.arange(2 * size, dtype=torch.float64).reshape(size, 2)
    frozen = np.arange(size)
    frozen.flags.writeable = False
    given = {
        "tensor": tensor, "transposed": tensor.T, "half": tensor.half(), "bools": tensor > size, "frozen": frozen,
        "strided": np.asfortranarray(tensor.numpy()), "parameter": nn.Parameter(tensor.float(), requires_grad=False),
        "record": np.zeros(size, dtype=[("a", "i4"), ("b", "f8")]), "empty": torch.empty(0, size),
    }  # fmt: skip

    back = there_and_back(given, tmp_path)

    for key, value in given.items():
        assert type(back[key]) is type(value) and back[key].dtype == value.dtype and back[key].shape == value.shape
        assert (np.asarray(back[key]) == np.asarray(value)).all()
    assert back["transposed"].stride() == (1, 2)
    assert back["strided"].flags.f_contiguous and not back["frozen"].flags.writeable
    again = unpack(tmp_path / "payload")
    back["tensor"].zero_()
    back["strided"][:] = 0
    assert torch.equal(again["tensor"], tensor) and tensor[-1, -1] == 2 * size - 1


def test_what_shares_memory_is_written_once_and_shares_it_there(tmp_path):
    """A tensor and its views, and tied parameters, keep sharing memory."""
    whole = torch.zeros(1_000_000)
    model = nn.ModuleList([nn.Linear(1000, 1000, bias=False) for _ in range(2)])
    model[1].weight = model[0].weight

    whole_back, part_back, model_back = there_and_back([whole, whole[10:20], model], tmp_path)

    part_back.fill_(1)
    assert whole_back.sum() == 10
    assert model_back[0].weight is model_back[1].weight
    assert (tmp_path / "payload.buffers").stat().st_size < 8_100_000


def test_nothing_of_it_is_left_when_it_is_removed(tmp_path):
    """Objects unpacked before stay usable."""
    back = there_and_back(torch.ones(1_000_000), tmp_path)

    remove_files(tmp_path / "payload")

    assert not list(tmp_path.iterdir())
    assert back.sum() == 1_000_000


class LookBehind(dl.Callback):
    """A callback that records, during a run, the payload files that are left."""

    def __init__(self, path):
        super().__init__(order=dl.CallbackOrder.External)
        self.path = path

    def on_loader_start(self, runner):
        runner.engine.barrier()
        if runner.engine.is_main_process:
            folder = Path(os.environ["RUNNERKIT_STORE"]).parent
            self.path.write_text(" ".join(path.name for path in folder.glob("payload*")))


def test_the_files_are_gone_once_all_processes_have_read_them(tmp_path):
    """Otherwise a killed run would leave them, and with temporary files in memory, data sets would take twice the
    space."""
    train(num_processes=2, callbacks=[LookBehind(tmp_path / "note")])

    assert (tmp_path / "note").read_text() == ""


class Counting(torch.optim.SGD):
    """An optimizer with attributes of its own, which ``Optimizer.__getstate__`` does not return."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.largest = self.param_groups[0]["params"][0]
        self.handle = None


@pytest.mark.parametrize(
    ("make", "name"), [(torch.optim.LBFGS, "_params"), (Counting, "largest")], ids=["LBFGS", "a user's own"]
)
def test_an_optimizer_arrives_with_the_attributes_of_its_class(tmp_path, make, name):
    """Parameters among them are the copied model's; hooks and a scheduler's patch of `step` are not sent."""
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    copy, steps, scheduler = there_and_back((model, optimizer, scheduler), tmp_path)

    kept = getattr(steps, name)
    assert (kept[0] if isinstance(kept, list) else kept) is next(copy.parameters())
    assert scheduler.optimizer is steps and "step" not in vars(steps)
    before = copy.weight.detach().clone()
    loss = copy(torch.ones(1, 2)).sum()
    loss.backward()
    steps.step(lambda: loss)
    assert not torch.equal(copy.weight, before)


def test_an_attribute_of_an_optimizer_that_cannot_travel_stays_behind(tmp_path, caplog):
    """The optimizer is still sent, as by plain pickle, and a warning names the reason."""
    optimizer = Counting(nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer.handle = threading.Lock()

    copy = there_and_back(optimizer, tmp_path)

    assert not hasattr(copy, "handle") and copy.param_groups[0]["lr"] == 0.1
    assert "lock" in caplog.text
