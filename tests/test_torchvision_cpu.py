"""torchvision is imported late, cured when need be, and its absence is explained."""

import subprocess
import sys

import pytest
import torch

from runnerkit.torchvision_cpu import import_torchvision

UNCURED = "operator torchvision::nms does not exist"
FAIL_ONCE = """
from pathlib import Path
tried = Path(__file__).with_suffix(".tried")
if not tried.exists():
    tried.touch()
    raise RuntimeError({message!r})
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Make `import torchvision` run the given source."""

    def install(source):
        (tmp_path / "torchvision.py").write_text(source)
        monkeypatch.delitem(sys.modules, "torchvision", raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    import_torchvision()  # the real one first, so that monkeypatch puts it back
    return install


def test_a_fresh_process_imports_torchvision_late_and_without_a_warning():
    """Importing contrib leaves torchvision alone; a user's own failed import before ours does no harm."""
    script = f"""
import sys
import runnerkit.contrib
assert "torchvision" not in sys.modules
try:
    import torchvision
except RuntimeError as error:
    assert "{UNCURED}" in str(error)
from runnerkit.torchvision_cpu import import_torchvision
torchvision = import_torchvision()
assert import_torchvision() is torchvision is sys.modules["torchvision"]
import torch
assert torchvision.models.resnet18(num_classes=3).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
"""

    finished = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)

    assert finished.returncode == 0, finished.stderr


def test_the_operators_are_there():
    """And stay: declared again they would raise."""
    import_torchvision()
    import_torchvision()

    assert hasattr(torch.ops.torchvision, "nms")


def test_missing_torchvision_is_explained(monkeypatch):
    """The message is the command."""
    monkeypatch.setitem(sys.modules, "torchvision", None)

    with pytest.raises(ImportError, match=r"pip install runnerkit\[vision\]"):
        import_torchvision()


def test_a_module_that_torchvision_misses_keeps_its_name(stand_in):
    """A broken installation is not an absent one."""
    stand_in("import no_such_module")

    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_torchvision()


@pytest.mark.parametrize(
    ("message", "cuda"), [(UNCURED, "13.0"), ("another reason", None)], ids=["torch with CUDA", "another reason"]
)
def test_other_failures_are_passed_on(stand_in, monkeypatch, message, cuda):
    """Only a CPU-only torch is cured, and only of the one complaint: there is no second attempt."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    stand_in(FAIL_ONCE.format(message=message))

    with pytest.raises(RuntimeError, match=message):
        import_torchvision()


def test_an_incurable_torchvision_raises_its_own_error(stand_in, monkeypatch):
    """The second attempt is the last."""
    monkeypatch.setattr(torch.version, "cuda", None)
    stand_in(f"raise RuntimeError({UNCURED!r})")

    with pytest.raises(RuntimeError, match=UNCURED):
        import_torchvision()
