"""Functions on their way to other processes: what cannot travel is named by the path that leads to it."""

import threading
from functools import partial

import pytest

from runnerkit.engines.payload import pack, unpack

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


with_a_global.__module__ = "__main__"  # pickled by value, with the globals that it uses


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
def test_what_cannot_be_sent_is_named_by_its_path(value, path):
    """In partials, methods and functions, with what to do about it."""
    with pytest.raises(TypeError, match=rf"^{path} is a lock and cannot be sent .*make it where it is used"):
        pack(value)


def test_a_lambda_arrives_as_it_was():
    """With what it refers to."""
    factor = 3

    assert unpack(pack(lambda x: factor * x))(2) == 6
