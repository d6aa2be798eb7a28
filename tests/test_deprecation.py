"""Tests of the `deprecated` decorator and a check that no deprecated name outlives its announced version."""

import ast
import inspect
import re
import warnings
from pathlib import Path

import pytest

from runnerkit.support.deprecation import deprecated
from runnerkit.version import __version__

ROOT = Path(__file__).parents[1]


@deprecated(instead="new(value)", since="0.2.0", removed_in="1.0.0")
def old(value):
    """Return twice the value."""
    return 2 * value


class New:
    def __init__(self, value):
        self.value = value


Old = deprecated(instead="New", since="0.2.0", removed_in="1.0.0")(type("Old", (New,), {}))


def here():
    """Return the line number of the caller."""
    return inspect.currentframe().f_back.f_lineno


def test_a_function_warns_at_the_callers_line():
    """The FutureWarning names the replacement at the caller's line; the function works as before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line, result = here(), old(21)

    [warning] = caught
    assert str(warning.message) == "old is deprecated since 0.2.0 and will be removed in 1.0.0: use new(value)"
    assert (warning.category, warning.filename, warning.lineno) == (FutureWarning, __file__, line)
    assert (result, old.__name__, old.__doc__) == (42, "old", "Return twice the value.")


def test_a_class_warns_who_makes_one_and_who_inherits():
    """Instantiating and subclassing warn at their own lines; the class works as before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        New(4)  # does not warn
        made_at, made = here(), Old(value=3)
        inherited_at, heir = here(), type("Heir", (Old,), {})

    assert [(each.filename, each.lineno) for each in caught] == [(__file__, made_at), (__file__, inherited_at)]
    [message] = {str(each.message) for each in caught}
    assert message == "Old is deprecated since 0.2.0 and will be removed in 1.0.0: use New"
    assert isinstance(made, New) and made.value == 3 and issubclass(heir, New)


def as_numbers(version):
    return tuple(int(each) for each in version.split("."))


def overdue(root):
    """List, as "file:line", deprecated names whose `removed_in` is not after the current version."""
    found = []
    for folder in ("runnerkit", "engines", "callbacks", "loggers"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "deprecated":
                    said = {each.arg: each.value.value for each in node.keywords}
                    if as_numbers(said["removed_in"]) <= as_numbers(__version__):
                        found.append(f"{path.name}:{node.lineno}")
    return found


def test_nothing_outlives_the_version_it_goes_away_in():
    """Deprecated names are removed by the version that they announce."""
    assert overdue(ROOT) == []


@pytest.mark.parametrize(("removed_in", "found"), [(__version__, ["old.py:1"]), ("999.0.0", [])])
def test_what_outlives_it_is_found(tmp_path, removed_in, found):
    """An overdue name is found, so the test above can fail."""
    (tmp_path / "engines").mkdir()
    source = f'@deprecated(instead="new()", since="0.0.1", removed_in="{removed_in}")\ndef old(): pass\n'
    (tmp_path / "engines" / "old.py").write_text(source)

    assert overdue(tmp_path) == found


def test_the_guide_shows_the_helper_as_it_is():
    """The example in CONTRIBUTING.md has the arguments of `deprecated`."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

    [shown] = re.findall(r"`@deprecated\((.*)\)`", guide)
    assert set(re.findall(r"(\w+)=", shown)) == inspect.signature(deprecated).parameters.keys()
