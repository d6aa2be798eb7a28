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


def test_the_table_of_the_page_is_replaced():
    """The rest of the page stays, and a second time changes nothing."""
    begin, end = SCRIPT["BEGIN"], SCRIPT["END"]
    page = f"# Versions\n{begin}old\n{end}more\n"

    written = SCRIPT["with_table"](page, "a\nb")

    assert written == f"# Versions\n{begin}a\nb\n{end}more\n" == SCRIPT["with_table"](written, "a\nb")


def test_the_page_has_a_row_for_each_install_and_all_were_imported():
    text = SCRIPT["PAGE"].read_text(encoding="utf-8").split(SCRIPT["BEGIN"])[1].split(SCRIPT["END"])[0]

    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert ["| " + " | ".join(rows[0]) + " |"] == SCRIPT["HEAD"].splitlines()[:1]
    assert [row[0] for row in rows[2:]] == ["`runnerkit`", "`runnerkit[demo]`", "`runnerkit[all]`"]
    for _, _, num_packages, size, size_of_torch, check, imported in rows[2:]:
        assert int(num_packages) > 20 and int(size.replace(",", "")) > int(size_of_torch.replace(",", "")) > 100
        assert check == "no broken requirements found"
        tried, of = imported.removesuffix(" modules").split(" of ")
        assert tried == of
    sizes = [int(row[3].replace(",", "")) for row in rows[2:]]
    assert sizes == sorted(sizes) and "torch 2." in text
