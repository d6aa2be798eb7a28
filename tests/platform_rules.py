"""Breaks each rule of Windows, and prints the errors; runnerkit is not imported."""

import contextlib
import os
import signal
import sys
from pathlib import Path


def error_of(action):
    try:
        action()
    except (OSError, UnicodeError, ImportError) as error:
        return type(error).__name__
    return "none"


def read_only_sync():
    descriptor = os.open("open", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


Path("other").touch()
with Path("open").open("w") as file:
    file.write("é\n")
    print("replace", error_of(lambda: os.replace("other", "open")))
    print("unlink", error_of(lambda: Path("open").unlink()))
print("bytes", Path("open").read_bytes())
print("folder", error_of(lambda: os.open(".", os.O_RDONLY)))
print("sync", error_of(read_only_sync))
print("name", error_of(lambda: Path("12:30").touch()), error_of(lambda: Path("12:30").write_text("")))
print("text", error_of(lambda: Path("greek").write_text("λ")))
print("link", error_of(lambda: os.symlink("open", "link")))
print("proc", error_of(lambda: os.listdir("/proc")))
print("fcntl", error_of(lambda: __import__("fcntl")))
names = ((signal, "SIGHUP"), (signal, "SIGKILL"), (os, "fork"), (os, "killpg"), (os, "O_NOFOLLOW"))
print("names", [hasattr(module, name) for module, name in names])
print("system", sys.platform)
with contextlib.suppress(OSError):
    os.replace("other", "open")
print("closed", Path("other").exists())
