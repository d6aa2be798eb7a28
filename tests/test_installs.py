"""Tests of scripts/installs.py, which installs runnerkit with few extras and measures what comes with it."""

import runpy
from zipfile import ZipFile

import pytest

from tests.test_release import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "installs.py"))
METADATA = """\
Metadata-Version: 2.4
Name: runnerkit
Requires-Dist: torch>=2.11
Requires-Dist: typing_extensions>=4.10
Requires-Dist: scikit-learn>=1.5; extra == "demo"
Requires-Dist: only-for-windows; sys_platform == "win32"
"""


def test_packages_of_a_torch_for_cuda_are_recognized():
    """They would download gigabytes; nvidia-ml-py, of the extra gpu, is small."""
    names = ["torch", "nvidia-ml-py", "nvidia_cublas", "nvidia-cudnn-cu13", "cuda-toolkit", "triton", "tritonclient"]

    assert SCRIPT["packages_of_cuda"](names) == ["nvidia_cublas", "nvidia-cudnn-cu13", "cuda-toolkit", "triton"]


@pytest.mark.parametrize(("extra", "more"), [("", []), ("demo", ["scikit-learn"])])
def test_the_requirements_of_an_extra_are_those_of_the_wheel(tmp_path, extra, more):
    with ZipFile(tmp_path / "it.whl", "w") as wheel:
        wheel.writestr("runnerkit-0.1.0.dist-info/METADATA", METADATA)

    assert SCRIPT["requirements_of"](tmp_path / "it.whl", extra) == ["torch", "typing-extensions", *more]


def test_byte_code_does_not_count(tmp_path):
    (tmp_path / "a.py").write_bytes(b"0" * 3_000_000)
    (tmp_path / "a.pyc").write_bytes(b"0" * 3_000_000)

    assert SCRIPT["megabytes"](tmp_path) == 3


def test_a_command_that_fails_ends_the_script_with_its_output():
    with pytest.raises(SystemExit, match="failed:\n"):
        SCRIPT["run"]("false")
