"""What a process holds in main memory, by Linux's count; the standard library's peak may be the parent process's."""

from pathlib import Path


def resident_mib(name: str) -> float:
    """Return ``"VmRSS"``, what is held, or ``"VmHWM"``, the most so far, in MiB: proc_pid_status(5)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
