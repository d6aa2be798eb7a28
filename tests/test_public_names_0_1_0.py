"""Scripts that were written for runnerkit 0.1.0 keep running: no name and no argument is gone."""

import re

import pytest

from runnerkit import dl, metrics
from tests.public_names_0_1_0 import RECORD, names, signatures

# Parameters that changed without changing what a script does: None is one epoch, unless there is another limit; files
# that are present are not downloaded; callers pass the state of a metric by position. And one that changes it, as the
# changelog says: the counts of a confusion matrix are logged as a table, and as metrics only on request.
SAME = {
    "download=False": "download=True",
    "kw num_epochs=1": "kw num_epochs=None",
    "sums": "state",
    "kw log_counts=True": "kw log_counts=False",
}

# Methods of callbacks that are methods of metric objects by another name.
MOVED = {"check": "columns"}


def parameters(line: str) -> list[str]:
    """Return the parameters of a line such as ``name(a; kw b=1)``."""
    return line.partition("(")[2].removesuffix(")").split("; ")


def taken_away(before: str, now: str) -> list[str]:
    """Return the parameters of `before` that `now` lacks, has at another position or with another default."""
    old, new = parameters(before), parameters(now)
    positional = [each for each in old if not each.startswith(("kw ", "*"))]
    moved = [each for place, each in enumerate(positional) if new[place : place + 1] not in ([each], [SAME.get(each)])]
    return moved + [each for each in old if each not in positional and SAME.get(each, each) not in new]


def is_elsewhere(line: str) -> bool:
    """Tell whether a method is inherited now, or moved from a metric callback to its metric object."""
    callback, _, method = line.partition("(")[0].partition(".")
    metric = re.sub("(Squared|Score|)Callback$", "Metric", callback)
    kinds = (getattr(dl, callback, None), getattr(metrics, metric, None))
    return any(hasattr(kind, MOVED.get(method, method)) for kind in kinds)


def test_every_name_and_argument_of_0_1_0_still_exists():
    """Arguments may be added behind those that there were."""
    recorded = RECORD.read_text(encoding="utf-8").splitlines()
    now = {line.partition("(")[0]: line for line in (*names(), *signatures())}

    missing = [line for line in recorded if line.partition("(")[0] not in now]
    assert [line for line in missing if not is_elsewhere(line)] == []
    kept = [line for line in recorded if "(" in line and line not in missing]
    lost = {line: taken_away(line, now[line.partition("(")[0]]) for line in kept}
    assert {line: each for line, each in lost.items() if each} == {}


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        ("f(a; b=1; kw c)", "f(a; b=1; d=2; kw c; kw e=3)", []),
        ("f(a; b=1)", "f(b=1; a)", ["a", "b=1"]),
        ("f(a=1; kw b=1)", "f(a=2; kw b=2)", ["a=1", "kw b=1"]),
        ("f(a; **options)", "f(a)", ["**options"]),
        ("f()", "f()", []),
    ],
)
def test_a_changed_argument_is_found(before, now, lost):
    assert taken_away(before, now) == lost
