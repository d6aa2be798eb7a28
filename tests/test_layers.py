"""Tests that a module imports only from its own layer and from lower ones."""

import shutil
from pathlib import Path

from tests.layers import violations

ROOT = Path(__file__).parents[1]


def test_every_import_follows_the_layers():
    """Interfaces do not import engines, nor side packages one another; optional packages are imported late."""
    assert violations(ROOT) == []


BAD = [
    ("callbacks/monitor/timer.py", "from runnerkit.engines.ddp import spawn", "never import one another"),
    ("loggers/csv.py", "import runnerkit.callbacks.monitor.timer", "never import one another"),
    ("runnerkit/metrics/means.py", "from runnerkit.runner import IRunner", "against the layers"),
    ("runnerkit/metrics/means.py", "from runnerkit import runner", "against the layers"),
    ("runnerkit/engine.py", "def late():\n    from runnerkit.engines.ddp import spawn", "against the layers"),
    ("runnerkit/engine.py", 'AT = "runnerkit.engines.ddp"', "in a string"),
    ("runnerkit/runner.py", "from runnerkit.supervised import SupervisedRunner", "against the layers"),
    ("engines/ddp.py", "import runnerkit", "facades"),
    ("engines/ddp.py", "from runnerkit import dl", "facades"),
    ("engines/ddp.py", "from .device import CPUEngine", "absolute"),
    ("callbacks/metrics/metric.py", "import engines.ddp", "users do not have this package"),
    ("runnerkit/history/frame.py", "import pandas", "where it is used"),
    ("runnerkit/unheard_of.py", "", "in no layer"),
]


def test_imports_against_the_layers_are_found(tmp_path):
    """Bad imports added to a copy give exactly one finding each, so the test above can fail."""
    for folder in ("runnerkit", "engines", "callbacks", "loggers"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    expected = []
    for path, line, reason in BAD:
        with (tmp_path / path).open("a+") as file:
            file.write(f"\n{line}\n")
            file.seek(0)
            last = len(file.readlines())
        expected.append((f"{Path(path).name}:{last if line else 1}:", reason))

    found = violations(tmp_path)

    assert len(found) == len(BAD)
    for place, reason in expected:
        assert [each for each in found if each.startswith(place) and reason in each], (place, reason)
