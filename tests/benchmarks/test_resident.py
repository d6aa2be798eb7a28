"""Memory is measured for the process itself, not for its parent."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.resident import resident_mib


@pytest.mark.cold
def test_the_peak_is_the_process_own():
    """The peak excludes the parent's memory, which `ru_maxrss` includes after exec."""
    held = torch.ones(2**25)  # 128 MiB
    script = "from benchmarks.resident import resident_mib; print(resident_mib('VmHWM'))"
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, check=True
    )

    assert resident_mib("VmRSS") > held.nbytes / 2**20 > 2 * float(child.stdout)


def test_what_came_and_went_is_in_the_peak():
    before = resident_mib("VmHWM")
    held = torch.ones(int((before - resident_mib("VmRSS")) * 2**18) + 2**26)  # 256 MiB above the peak so far
    del held

    assert resident_mib("VmHWM") == pytest.approx(before + 256, abs=64)
    assert resident_mib("VmRSS") < before + 128
