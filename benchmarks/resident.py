"""Resident memory of this process on Linux; the standard library's peak may be that of the parent process."""

from pathlib import Path


def resident_mib(name: str) -> float:
    """Return ``"VmRSS"``, the current resident memory, or ``"VmHWM"``, its peak, in MiB: proc_pid_status(5)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
