"""Tests that torchvision is imported late, patched if necessary, and that its absence is explained."""

import subprocess
import sys

import pytest
import torch

from runnerkit import torchvision_cpu
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
    """Return a function that makes `import torchvision` run the given source."""

    def install(source):
        (tmp_path / "torchvision.py").write_text(source)
        monkeypatch.delitem(sys.modules, "torchvision", raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    import_torchvision()  # the real one first, so that monkeypatch restores it
    return install


def test_a_fresh_process_imports_torchvision_late_and_without_a_warning():
    """contrib does not import torchvision, and import_torchvision works after a failed import by the user."""
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


@pytest.mark.parametrize(
    ("source", "words"), [(None, r"pip install runnerkit\[vision\]"), ("import no_such", "no_such")]
)
def test_what_is_missing_is_named(stand_in, monkeypatch, source, words):
    """Without torchvision, by the install command; a module that torchvision imports, by its own name."""
    if source:
        stand_in(source)
    else:
        monkeypatch.setitem(sys.modules, "torchvision", None)

    with pytest.raises(ImportError, match=words):
        import_torchvision()


@pytest.mark.parametrize(
    ("message", "cuda"), [(UNCURED, "13.0"), ("another reason", None)], ids=["torch with CUDA", "another reason"]
)
def test_other_failures_are_passed_on(stand_in, monkeypatch, message, cuda):
    """Other errors, and any error with a CUDA build of torch, are raised without a second attempt."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    stand_in(FAIL_ONCE.format(message=message))

    with pytest.raises(RuntimeError, match=message):
        import_torchvision()


def test_an_incurable_torchvision_raises_its_own_error(stand_in, monkeypatch):
    """If the second attempt fails too, its error is raised."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torchvision_cpu, "_declare_missing_ops", lambda: None)  # a build for CUDA has them
    stand_in(f"raise RuntimeError({UNCURED!r})")

    with pytest.raises(RuntimeError, match=UNCURED):
        import_torchvision()
