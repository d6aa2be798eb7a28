"""Tests of the lists of members that users' objects may lack."""

from dataclasses import dataclass, field

import pytest

from runnerkit.sampling import loader_members
from runnerkit.sampling.feed import samplers_of
from runnerkit.support.members import Member, Members, field_values


class LoaderMembers(Members):
    num_workers = Member(0)
    first = Member(None, name="_first")


class Lazy:
    def __init__(self):
        self.num_asked = 0

    @property
    def num_workers(self):
        self.num_asked += 1
        return 3

    @property
    def _first(self):
        raise ValueError("not read yet")


def test_a_member_is_read_when_it_is_asked_for():
    """Listing a member must not compute a property that nobody asked for, and hides no error of one."""
    loader = Lazy()
    members = LoaderMembers(loader)
    assert loader.num_asked == 0

    assert [members.num_workers, members.num_workers, loader.num_asked] == [3, 3, 2]
    with pytest.raises(ValueError, match="not read yet"):
        _ = members.first


def test_an_object_without_a_member_has_the_default():
    assert [LoaderMembers(each).num_workers for each in (None, [1], object())] == [0, 0, 0]
    assert LoaderMembers(object()).first is None


class Forwards:
    """A loader of a class of the user's that forwards what it lacks."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)


class Plain:
    num_workers = 2
    dataset = "data"
    sampler = "order"


def test_loaders_of_any_class_are_asked():
    for loader in (Plain(), Forwards(Plain())):
        members = loader_members.LoaderMembers(loader)
        assert [members.num_workers, members.dataset, samplers_of(loader)] == [2, "data", ("order", None, None)]
    members = loader_members.LoaderMembers([1])
    assert [members.num_workers, members.dataset, samplers_of([1])] == [0, None, (None, None, None)]


def test_fields_never_set_are_left_out():
    @dataclass
    class Pair:
        first: int
        second: int = field(init=False)

    assert list(field_values(Pair(1))) == [("first", 1)]
