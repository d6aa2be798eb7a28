"""Checks that pass, fail, crash, hang and are skipped, for the tests of `make gpu`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.on_gpu.check import Check, Failed, Figures, Setting, Skipped

MARKS = "ON_GPU_MARKS"  # environment variable with a folder: files in it tell when a check ran


def passes(setting: Setting) -> Figures:
    return {"ratio": 1.0346, "device": setting.device_type}


def fails(setting: Setting) -> Figures:
    raise Failed("weights differ", {"difference": 0.5})


def raises(setting: Setting) -> Figures:
    print("last words")
    raise ZeroDivisionError("division | by zero\nand more")


def is_skipped(setting: Setting) -> Figures:
    setting.require_gpu("nothing to see")
    raise Skipped("not reached")


def crashes(setting: Setting) -> Figures:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def exits(setting: Setting) -> Figures:
    os._exit(3)


def hangs(setting: Setting) -> Figures:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(os.environ[MARKS]) / "child").write_text(str(child.pid))
    time.sleep(600)
    return {}


def marks(setting: Setting) -> Figures:
    began = time.monotonic()
    time.sleep(0.2)
    return {"began": began, "ended": time.monotonic()}


def meets(setting: Setting) -> Figures:
    """Wait until two of these run at the same time."""
    began, folder = time.monotonic(), Path(os.environ[MARKS])
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2 and time.monotonic() < began + 20:
        time.sleep(0.01)
    return {"began": began, "ended": time.monotonic()}


CHECKS = (
    Check("passes", passes),
    Check("fails", fails),
    Check("raises", raises),
    Check("is skipped", is_skipped),
    Check("crashes", crashes),
    Check("exits", exits),
    Check("hangs", hangs, limit_s=8),
    Check("beside", meets),
    Check("beside too", meets),
    Check("alone", marks, is_timed=True),
    Check("after", marks),
)
