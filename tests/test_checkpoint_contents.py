"""Tests that supported values survive a checkpoint and that the first save refuses others and names their place."""

import collections
import datetime
import enum
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from runnerkit import dl
from runnerkit.checkpoints.fault import fault_of
from runnerkit.checkpoints.file import load_checkpoint, save_checkpoint
from runnerkit.checkpoints.folder import CheckpointFolder, find_checkpoint
from runnerkit.checkpoints.plain_state import as_plain, copied
from runnerkit.commands.cli import main
from runnerkit.storage.checksum import sha256_of
from tests.interrupt import at
from tests.tiny import loader, mlp, sgd, train


class Color(enum.IntEnum):
    RED = 1


class Name(enum.StrEnum):
    A = "a"


Pair = collections.namedtuple("Pair", "a b")
SAVED = {"kind": "runner", "epoch": 1, "batch": 1, "score": None, "metrics": {}}
# name: (saved value, loaded value)
HELD = {
    "numbers": ([None, True, 3, 10**40, 0.1, 1j, "a", b"b"], [None, True, 3, 10**40, 0.1, 1j, "a", b"b"]),
    "bytearray": (bytearray(b"b"), bytearray(b"b")),
    "numpy's scalars": ((np.float64(0.5), np.int64(3), np.bool_(True), np.array(2)), (0.5, 3, True, 2)),
    "numpy's strings": ((np.str_("a"), np.bytes_(b"a")), ("a", b"a")),
    "keys": ({np.int64(3): 1, (1, np.int32(2)): 2, Color.RED: 3}, {3: 1, (1, 2): 2, 1: 3}),
    "sets": ({np.int64(1), 2}, {1, 2}),
    "enums of numbers": ([Color.RED, Name.A], [1, "a"]),
    "named tuples": (Pair(np.float32(1), [2]), (1.0, [2])),
    "default dicts": (collections.defaultdict(list, {1: [2]}), {1: [2]}),
    "counters": (collections.Counter("aab"), collections.Counter("aab")),
    "ordered": (collections.OrderedDict(b=1, a=2), collections.OrderedDict(b=1, a=2)),
    "torch's": ([torch.Size([2]), torch.float16, cpu := torch.device("cpu")], [torch.Size([2]), torch.float16, cpu]),
    "version": (torch.__version__, str(torch.__version__)),
}  # fmt: skip


@pytest.mark.parametrize(("given", "back"), HELD.values(), ids=HELD)
def test_plain_values_come_back(tmp_path, given, back):
    """Plain values keep their types when plain `torch.load` reads them."""
    save_checkpoint({"value": given}, tmp_path / "a.pth")
    loaded = torch.load(tmp_path / "a.pth", weights_only=True)["value"]

    assert loaded == back and type(loaded) is type(back)
    if isinstance(back, list | tuple):
        assert [type(each) for each in loaded] == [type(each) for each in back]


@pytest.mark.parametrize("dtype", "?bBhHiIlLefdFD")
def test_arrays_come_back_as_tensors(tmp_path, dtype):
    """Arrays of every numeric dtype load as tensors, including reversed, read-only and empty ones."""
    array = np.arange(6).astype(dtype).reshape(2, 3)
    frozen = array.copy()
    frozen.flags.writeable = False
    given = {"whole": array, "backwards": array[::-1, ::2], "frozen": frozen, "empty": array[:0]}
    save_checkpoint(given, tmp_path / "a.pth")

    for key, tensor in load_checkpoint(tmp_path / "a.pth").items():
        assert isinstance(tensor, torch.Tensor)
        assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), given[key])


REFUSED = {
    "collections.deque": collections.deque([1]),
    "datetime.datetime": datetime.datetime(2026, 1, 1),
    "pathlib.PosixPath": Path("a"),
    "frozenset": frozenset([1]),
    "range": range(3),
    "builtin_function_or_method": len,
    r"numpy.ndarray \(object\)": np.array([None]),
    r"numpy.ndarray \(<U1\)": np.array(["a"]),
    r"numpy.ma.MaskedArray \(float64\)": np.ma.masked_array([1.0], [True]),
    r"numpy.datetime64 \(datetime64\[Y\]\)": np.datetime64("2026"),
    "torch._C.Generator": torch.Generator(),
}


@pytest.mark.parametrize(("words", "value"), REFUSED.items(), ids=map(str, REFUSED))
def test_what_cannot_be_loaded_is_not_saved(tmp_path, words, value):
    """The error names the place and the type of the value, and no file is written."""
    with pytest.raises(TypeError, match=rf"^callbacks\['x'\]\['history'\]\[1\] is of type ({words}), which a check"):
        save_checkpoint({"callbacks": {"x": {"history": [0, value]}}}, tmp_path / "a.pth")
    assert not list(tmp_path.iterdir())


def test_keys_elements_and_attributes_are_looked_at_too():
    """Everything that is pickled is checked: dict keys, set elements and attributes."""
    state = collections.OrderedDict(weight=1)
    state._metadata = {"": {"version": Path("a")}}
    tensor = torch.zeros(1)
    tensor.source = Path("a")

    with pytest.raises(TypeError, match=r"^a key of x\['y'\] is of type pathlib"):
        as_plain({"x": {"y": {Path("a"): 1}}})
    with pytest.raises(TypeError, match=r"^an element of x\['y'\] is of type frozenset"):
        as_plain({"x": {"y": {frozenset()}}})
    with pytest.raises(TypeError, match=r"^m\['_metadata'\]\[''\]\['version'\] is of type pathlib"):
        as_plain({"m": state})
    with pytest.raises(TypeError, match=r"^t is of type torch.Tensor"):
        as_plain({"t": tensor})


def test_what_the_user_allows_torch_to_load_is_saved(tmp_path):
    """Types in torch's list of safe globals are saved and loaded."""
    with torch.serialization.safe_globals([datetime.timedelta]):
        save_checkpoint({"waited": datetime.timedelta(1)}, tmp_path / "a.pth")
        assert load_checkpoint(tmp_path / "a.pth")["waited"] == datetime.timedelta(1)


def test_weights_stay_the_tensors_that_they_are():
    """Tensors are neither copied nor untied, module versions are kept, and a large model takes almost no time."""
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(2000)))
    state = model.state_dict()
    begin = time.process_time()
    plain = as_plain(state)

    assert time.process_time() - begin < 1  # about 30 ms for 10,000 tensors
    assert plain._metadata == state._metadata and list(plain) == list(state)
    assert all(plain[name] is state[name] for name in state)


def test_a_copy_has_no_part_that_changes_later():
    """A copy shares no mutable object, but tied weights stay one tensor and a view of a part is copied as a part."""
    weight = torch.arange(6.0).reshape(2, 3)
    state = {
        "set": {1}, "bytes": bytearray(b"a"), "array": np.zeros(2), "counter": collections.Counter("aab"),
        "pair": Pair([1], {2}), "default": collections.defaultdict(set, {1: {2}}),
        "a": {"tied": weight, "same": weight}, "part": weight[0], "step": [1, (2.5, "x")],
    }  # fmt: skip
    copy = copied(state)
    weight.zero_()
    state["set"].add(2), state["bytes"].extend(b"b"), state["array"].fill(1), state["counter"].update("a")
    state["pair"].a.append(2), state["pair"].b.add(3), state["default"][1].add(3)

    assert copy["set"] == {1} and copy["bytes"] == b"a" and copy["array"].tolist() == [0, 0]
    assert copy["a"]["tied"] is copy["a"]["same"] and copy["a"]["tied"].sum() == 15
    assert copy["part"].tolist() == [0, 1, 2] and copy["step"] == [1, (2.5, "x")]
    assert copy["counter"] == {"a": 2, "b": 1} and copy["pair"] == ([1], {2}) and copy["default"] == {1: {2}}


class History(dl.Callback):
    """Callback with a state that records the state it is given on resume."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def state_dict(self):
        return {"history": self.value}

    def load_state_dict(self, state):
        self.back = state["history"]


def fit(logdir, *callbacks, **options):
    return train(logdir=logdir, loaders={"train": loader(8, 4)}, callbacks=callbacks, resume="auto", **options)


def test_a_run_goes_on_with_numpys_numbers(tmp_path):
    """A NumPy learning rate is restored as a number, and a callback's array as a tensor."""
    lr, model, history = np.logspace(-3, -1, 3)[1], mlp(), History(None)
    fit(tmp_path, History({np.int64(1): np.arange(3)}), model=model, optimizer=sgd(model, lr=lr))
    runner = fit(tmp_path, history, num_epochs=2)

    assert runner.epoch_step == 2 and runner.optimizer.param_groups[0]["lr"] == lr
    assert torch.equal(history.back[1], torch.arange(3))


class Decay:
    def __init__(self):
        self.path = Path("a")

    def __call__(self, epoch):
        return 0.9**epoch


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return collections.deque([1])

    def set_extra_state(self, state):
        pass


def decayed(optimizer, num_steps):
    return LambdaLR(optimizer, Decay())


@pytest.mark.parametrize("is_own", [False, True], ids=["train's own", "asynchronous"])
def test_a_run_ends_at_its_first_save(tmp_path, is_own):
    """The error names the place of the unsupported value, and no checkpoint is left behind."""

    def fails(words, *callbacks, content="runner", **options):
        own = dl.CheckpointCallback(tmp_path, content=content, asynchronous=True, every_steps=1)
        with pytest.raises(TypeError, match=words):
            fit(tmp_path, *callbacks, *([own] if is_own else []), num_epochs=3, **options)
        assert not list(tmp_path.glob("checkpoints/*"))

    fails(r"^callbacks\['.*History'\]\['history'\] is of type collections.deque", History(collections.deque()))
    fails(r"^scheduler_state_dict\[''\]\['lr_lambdas'\]\[0\]\['path'\] is of type pathlib", scheduler=decayed)
    fails(r"^model_state_dict\['_extra_state'\] is of type collections.deque", model=WithExtraState(6, 3))
    fails(r"^model_state_dict\['_extra_state'\] is of type", model=WithExtraState(6, 3), content="model")


class OnRankZero(History):
    """Callback whose state cannot be saved on the main process only."""

    def on_experiment_start(self, runner):
        self.value = collections.deque() if runner.engine.is_main_process else []


def test_all_ranks_end_with_the_cause(tmp_path):
    """An error raised while saving, on rank zero only, ends all ranks."""
    with pytest.raises(TypeError, match=r"^callbacks\['.*OnRankZero'\]\['history'\] is of type collections.deque"):
        fit(tmp_path, OnRankZero(None), num_epochs=2, num_processes=2)
    assert not list(tmp_path.glob("checkpoints/*"))


def checkpoint_of_old(folder, name, value, **what):
    """Write a checkpoint as earlier versions did."""
    record = CheckpointFolder(folder).add(name, {"format_version": 1}, **what)
    torch.save({"format_version": 1, "value": value}, folder / name)
    index = (folder / "index.json").read_text().replace(record.sha256, sha256_of(folder / name))
    size = (folder / name).stat().st_size
    (folder / "index.json").write_text(index.replace(f'"size_bytes": {record.size_bytes}', f'"size_bytes": {size}'))
    CheckpointFolder(folder).set_alias("last", record)


def test_what_is_wrong_with_checkpoints_is_told_apart(tmp_path, capsys, caplog):
    """Errors distinguish damaged checkpoints, unsupported contents, weights only and no checkpoints."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    foreign = r"holds collections.deque, which is not loaded, as it could run code"
    with pytest.raises(FileNotFoundError, match=r"it does not contain checkpoints$"):
        find_checkpoint(tmp_path)

    weights = CheckpointFolder(folder).add("model.0001.pth", {"weight": torch.zeros(1)}, **SAVED | {"kind": "model"})
    CheckpointFolder(folder).set_alias("last", weights)
    with pytest.raises(FileNotFoundError, match=r"its checkpoints hold weights only \(content='model'\)$"):
        find_checkpoint(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 0
    assert "checkpoints: weights only (content='model'): a run cannot resume from them" in capsys.readouterr().out

    checkpoint_of_old(folder, "model.0002.pth", collections.deque([1]), **SAVED)
    with pytest.raises(FileNotFoundError, match=rf"resume from in .*checkpoints: model.0002.pth {foreign}[^;]*$"):
        find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=rf"last.pth {foreign}"):
        dl.SupervisedRunner(mlp()).load(tmp_path, which="last")
    with pytest.raises(ValueError, match=rf"model.0002.pth {foreign}"):
        dl.SupervisedRunner(mlp()).load(folder / "model.0002.pth")
    assert main(["doctor", str(tmp_path)]) == 1
    assert "BROKEN  checkpoints/model.0002.pth: holds collections.deque, which" in capsys.readouterr().out

    CheckpointFolder(folder).add("model.0003.pth", {"format_version": 1}, **SAVED)
    (folder / "model.0003.pth").write_bytes(b"torn")
    with pytest.raises(FileNotFoundError, match=rf"model.0003.pth is damaged: .*; model.0002.pth {foreign}"):
        find_checkpoint(tmp_path)
    (folder / "index.json").unlink()
    (folder / "model.0001.pth").unlink()
    with pytest.raises(FileNotFoundError, match=rf"model.0002.pth {foreign}.*; model.0003.pth is not a complete"):
        find_checkpoint(tmp_path)


def test_a_name_that_is_written_again_is_in_the_index_once(tmp_path):
    """A rewritten checkpoint is listed once, last, with its new checksum."""
    folder = CheckpointFolder(tmp_path)
    for name, value in [("model.0001.pth", 1), ("model.0002.pth", 2), ("model.0001.pth", 3)]:
        folder.add(name, {"value": value}, **SAVED)

    again = CheckpointFolder(tmp_path)

    assert [record.name for record in again.records] == ["model.0002.pth", "model.0001.pth"]
    assert fault_of(tmp_path / "model.0001.pth", again.records[-1]) is None


def test_a_flipped_bit_in_a_name_is_damage(tmp_path):
    """A flipped bit in a pickled name is reported as damage, not as an unsupported type."""
    path = save_checkpoint({"weight": torch.zeros(1)}, tmp_path / "a.pth")
    content = path.read_bytes()
    assert content.count(b"_rebuild_tensor_v2") == 1
    path.write_bytes(content.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"))

    with pytest.raises(ValueError, match=r"a.pth is not a complete checkpoint of .*: the checksum of"):
        load_checkpoint(path)


def test_what_is_set_after_the_callback_was_made_counts(tmp_path):
    """A subclass may set it after `super().__init__`."""
    checkpoint = dl.CheckpointCallback(tmp_path / "logs", monitor="train/loss", mode="max")
    checkpoint.folder, checkpoint.keep_best, checkpoint.save_best = tmp_path / "elsewhere", 3, False

    train(mlp(), callbacks=[checkpoint], num_epochs=6)

    names = {each.name for each in (tmp_path / "elsewhere").iterdir()}
    assert "last.pth" in names and "best.pth" not in names and not (tmp_path / "logs" / "checkpoints").exists()
    assert len([each for each in names if each.startswith("model.")]) == 5  # the best three, and the last two


@pytest.mark.parametrize("accumulation_steps", [1, 2, 3])
def test_every_minutes_saves_in_each_epoch_whatever_a_step_accumulates(tmp_path, accumulation_steps):
    """Steps of two batches, in an epoch that begins after an odd number of batches, all end at odd numbers."""
    kept = set()
    checkpoint = dl.CheckpointCallback(tmp_path, every_minutes=1e-9)
    note = at(
        "on_step_end", lambda _: kept.update(path.name for path in checkpoint.folder.glob("model.*.*.pth")), order=100
    )

    batches = {"train": loader(49, 1)}
    train(callbacks=[checkpoint, note], loaders=batches, accumulation_steps=accumulation_steps, num_epochs=2)

    assert {name.split(".")[1] for name in kept} == {"0001", "0002"}
