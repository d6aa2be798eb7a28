"""Contents of a batch as `handle_batch` gets them: containers keep their class, leaves are passed through.

RUNNERKIT_WRITE_BATCH_TABLE=1 writes the table of docs/data.md.
"""

import datetime
import enum
import os
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.results import read_section, write_section
from runnerkit import dl
from runnerkit.support.device_move import move
from tests.tiny import train

META = torch.device("meta")  # stands in for a GPU: a tensor there has been moved
PAGE = Path(__file__).parents[1] / "docs" / "data.md"
COMMAND = "RUNNERKIT_WRITE_BATCH_TABLE=1 pytest tests/test_batch_contents.py -k table"


@dataclass
class Scaled:
    """A constructor that computes: run again, it would divide twice and lose what it made."""

    image: torch.Tensor
    scale: InitVar[float]
    made: dict = field(init=False)

    def __post_init__(self, scale):
        self.image = self.image / scale
        self.made = {"mean": self.image.mean()}


@dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor
    name: str = "a"


class Attributes(dict):
    """A dict of attributes with a constructor and a missing key of its own."""

    def __init__(self, image, *, source):
        super().__init__(image=image)
        self.source = source

    def __getattr__(self, name):
        raise KeyError(name)


class Images(list):
    size = None


class Point(namedtuple("Point", "x y")):
    def __new__(cls, x):
        return super().__new__(cls, x, x + 1)


class Named(NamedTuple):
    image: torch.Tensor
    name: str


class Graph:
    """An object with a method `to`, as graph libraries have."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device, non_blocking=False):
        return Graph(self.nodes.to(device))


class OnlyDevice(Graph):
    """An object whose method `to` takes the device alone, as many users write it."""

    def to(self, device):
        return OnlyDevice(self.nodes.to(device))


class InPlace(Graph):
    """An object whose method `to` moves it and returns nothing."""

    def to(self, *args, **kwargs):
        self.nodes = self.nodes.to(*args, **kwargs)


class Opaque:
    """An object that nobody can look into."""


Colour = enum.Enum("Colour", "RED")


def images():
    sized = Images([ones()])
    sized.size = (2, 2)
    return sized


def ones():
    return torch.ones(2)


def default():
    return defaultdict(list, image=ones())


CONTAINERS = {
    "dict": lambda: {"image": ones(), "name": "a"},
    "OrderedDict": lambda: OrderedDict([("b", ones()), ("a", 1)]),
    "defaultdict": default,
    "subclass of dict": lambda: Attributes(ones(), source="camera"),
    "UserDict": lambda: UserDict(image=ones()),
    "MappingProxyType": lambda: types.MappingProxyType({"image": ones()}),
    "list": lambda: [ones(), "a"],
    "subclass of list": images,
    "deque": lambda: deque([ones(), 1], maxlen=4),
    "tuple": lambda: (ones(), "a"),
    "NamedTuple": lambda: Named(ones(), "a"),
    "named tuple with a constructor": lambda: Point(ones()),
    "torch.Size": lambda: torch.Size([2, 3]),
    "set": lambda: {1, "a"},
    "frozenset": lambda: frozenset(["a"]),
    "dataclass": lambda: Scaled(ones(), 255.0),
    "frozen dataclass": lambda: Frozen(ones()),
    "object with a method to": lambda: Graph(ones()),
}
CONSTANT = ("MappingProxyType", "torch.Size", "frozenset")
LEAVES = {
    "NumPy array": np.arange(3),
    "NumPy number": np.float32(1.5),
    "str": "a",
    "bytes": b"a",
    "int": 1,
    "None": None,
    "complex": 1j,
    "Path": Path("a"),
    "date": datetime.date(2026, 1, 2),
    "Enum": Colour.RED,
    "range": range(3),
    "a class": nn.Linear,
    "a function": ones,
    "any other object": Opaque(),
}


def tensors(value):
    """Yield the tensors in a container of this file."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, dict | UserDict | types.MappingProxyType):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts = list(value)
    elif isinstance(value, Frozen):
        parts = [value.image]
    else:
        parts = list(vars(value).values()) if isinstance(value, Scaled | Graph) else []
    for each in parts:
        yield from tensors(each)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_keeps_its_class_and_its_tensors_are_moved(name):
    """One that can be changed is a copy: a loader that is a list would see handle_batch's change in its next epoch."""
    given = CONTAINERS[name]()

    moved, copy = move(given, META), move(given, torch.device("cpu"))

    assert type(moved) is type(given)
    assert len(list(tensors(moved))) == len(list(tensors(given)))
    assert all(each.device == META for each in tensors(moved))
    assert all(each.device.type == "cpu" for each in tensors(given)), "the loader's own is left alone"
    assert (copy is given) == (isinstance(given, tuple) or name == "frozenset")
    assert all(new is old for new, old in zip(tensors(copy), tensors(given), strict=True))


@pytest.mark.parametrize("name", LEAVES)
def test_anything_else_is_passed_through(name):
    assert move([LEAVES[name]], META)[0] is LEAVES[name]


def test_what_containers_hold_beside_tensors_is_kept():
    scaled, attributes = move(Scaled(ones() * 255, 255.0), META), move(Attributes(ones(), source="camera"), META)

    assert scaled.image.shape == (2,) and scaled.made["mean"].device == META
    assert float(move(Scaled(ones() * 255, 255.0), torch.device("cpu")).image[0]) == 1
    assert attributes.source == "camera"
    assert move(images(), META).size == (2, 2)
    assert move(default(), META).default_factory is list
    assert list(move(OrderedDict([("b", ones()), ("a", 1)]), META)) == ["b", "a"]
    assert move(deque([1], maxlen=4), META).maxlen == 4
    assert move(Point(torch.zeros(1)), torch.device("cpu")).y == 1


@pytest.mark.parametrize("kind", [OnlyDevice, InPlace])
def test_a_method_to_may_be_any(kind):
    """It need not take `non_blocking`, and may return nothing."""
    moved = move([kind(ones())], META)[0]
    assert type(moved) is kind and moved.nodes.device == META


@pytest.mark.parametrize("num_processes", [1, 2])
def test_they_arrive_in_handle_batch(num_processes):
    """Also in several processes, where a loader is sharded."""

    class Look(dl.Runner):
        def handle_batch(self, batch):
            assert type(batch) is Attributes and batch.source == "camera"
            self.batch_metrics["loss"] = self.model(batch["image"]).mean()

    def collate(rows):
        return Attributes(torch.stack(rows), source="camera")

    batches = torch.utils.data.DataLoader(torch.zeros(8, 6), batch_size=2, collate_fn=collate)

    train(runner=Look(), criterion=None, loaders={"train": batches}, num_processes=num_processes)


def test_the_table_of_the_page():
    """It lists what was asserted above."""
    constant = [name for name in CONTAINERS if "uple" in name or name in CONSTANT]
    copied = [name for name in CONTAINERS if name not in (*constant, "object with a method to")]
    rows = [
        f"| {', '.join(copied)} | a copy of the same class, with its tensors on the device |",
        f"| {', '.join(constant)} | the same class, with its tensors on the device |",
        "| object with a method to | what `to(device)` returns, with `non_blocking=True` if it takes that |",
        f"| {', '.join(LEAVES)} | the same object |",
    ]
    table = "\n".join(["| in a batch | in `handle_batch` |", "|---|---|", *rows])
    if os.environ.get("RUNNERKIT_WRITE_BATCH_TABLE"):
        write_section("batch contents", table, PAGE, command=COMMAND)

    assert read_section("batch contents", PAGE, command=COMMAND) == table
