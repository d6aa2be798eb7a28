"""The architecture's law: a module imports only from layers to its left."""

import shutil
from pathlib import Path

import pytest

from tests.layers import violations

ROOT = Path(__file__).parents[1]


def test_every_import_follows_the_layers():
    """Contracts know no engine; side packages do not know one another; optional packages are imported late."""
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "line", "reason"),
    [
        (
            "callbacks/timer.py",
            "from runnerkit.engines.ddp import DistributedDataParallelEngine",
            "never import one another",
        ),
        ("loggers/csv.py", "import runnerkit.callbacks.timer", "never import one another"),
        ("runnerkit/metrics.py", "from runnerkit.runner import IRunner", "against the layers"),
        ("runnerkit/metrics.py", "from runnerkit import runner", "against the layers"),
        ("runnerkit/engine.py", "def late():\n    from runnerkit.engines.ddp import spawn", "against the layers"),
        ("runnerkit/runner.py", "from runnerkit.supervised import SupervisedRunner", "against the layers"),
        ("engines/ddp.py", "import runnerkit", "facades"),
        ("engines/ddp.py", "from runnerkit import dl", "facades"),
        ("engines/ddp.py", "from .device import CPUEngine", "absolute"),
        ("callbacks/metric.py", "import engines.ddp", "no package that users have"),
        ("runnerkit/curves/history.py", "import pandas", "where it is used"),
        ("runnerkit/unheard_of.py", "", "in no layer"),
    ],
)
def test_an_import_against_the_layers_is_found(tmp_path, path, line, reason):
    """Planted in a copy, it makes exactly one finding: the test above can fail."""
    for folder in ("runnerkit", "engines", "callbacks", "loggers"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / path).open("a") as file:
        file.write(f"\n{line}\n")

    found = violations(tmp_path)

    assert len(found) == 1
    assert reason in found[0]


def test_an_import_for_types_only_is_none(tmp_path):
    """A callback names the runner's type under TYPE_CHECKING."""
    text = (ROOT / "callbacks" / "timer.py").read_text()

    assert "if TYPE_CHECKING:\n    from runnerkit.runner import IRunner" in text
