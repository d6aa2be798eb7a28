"""A stand-in for macOS or Windows: this process loses what the system lacks, before it imports runnerkit.

The standard library, torch and the other libraries are imported first and keep what they bound; runnerkit then meets
missing names, modules and files. Windows' rules for open files, folders and file names apply to every call from Python.

python -m tests.platform_stand_in {darwin,win32} [--libraries] SCRIPT ...
"""

import builtins
import contextlib
import errno
import fcntl
import importlib
import io
import os
import runpy
import shutil
import signal
import sys
import tempfile

import torch.utils.data  # noqa: F401  # before anything is missing

for _name in ("popen_spawn_posix", "queues", "resource_sharer", "synchronize"):  # else imported when a worker starts
    importlib.import_module(f"multiprocessing.{_name}")

_SIGNALS = {
    "darwin": ("SIGPOLL", "SIGPWR", "SIGRTMIN", "SIGRTMAX", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo"),
    "win32": (
        "SIGALRM", "SIGCHLD", "SIGCLD", "SIGCONT", "SIGHUP", "SIGIO", "SIGKILL", "SIGPIPE", "SIGPOLL", "SIGPROF",
        "SIGPWR", "SIGQUIT", "SIGRTMIN", "SIGRTMAX", "SIGSTKFLT", "SIGSTOP", "SIGSYS", "SIGTRAP", "SIGTSTP", "SIGTTIN",
        "SIGTTOU", "SIGURG", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGWINCH", "SIGXCPU", "SIGXFSZ", "alarm", "getitimer",
        "setitimer", "pause", "pthread_kill", "pthread_sigmask", "siginterrupt", "sigpending", "sigtimedwait",
        "sigwait", "sigwaitinfo", "SIG_BLOCK", "SIG_SETMASK", "SIG_UNBLOCK",
    ),
}  # fmt: skip
_OS = {
    "darwin": (
        "sched_getaffinity", "sched_setaffinity", "O_DIRECT", "O_NOATIME", "O_PATH", "O_TMPFILE", "fdatasync",
        "memfd_create", "pipe2", "posix_fadvise", "posix_fallocate", "setresuid", "getresuid", "copy_file_range",
        "pidfd_open", "getxattr", "setxattr", "splice", "eventfd",
    ),
    "win32": (
        "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "O_SYNC", "O_DIRECT", "O_NOATIME", "O_PATH",
        "O_TMPFILE", "chown", "chroot", "fchdir", "fchmod", "fchown", "fdatasync", "fork", "forkpty", "fpathconf",
        "fstatvfs", "getegid", "geteuid", "getgid", "getgroups", "getloadavg", "getpgid", "getpgrp", "getpriority",
        "getresuid", "getsid", "getuid", "getxattr", "initgroups", "killpg", "lchown", "lockf", "memfd_create",
        "mkfifo", "mknod", "nice", "openpty", "pathconf", "pidfd_open", "pipe2", "posix_fadvise", "posix_fallocate",
        "posix_spawn", "pread", "pwrite", "readv", "register_at_fork", "sched_getaffinity", "sched_setaffinity",
        "sched_yield", "sendfile", "setegid", "seteuid", "setgid", "setgroups", "setpgid", "setpriority", "setresuid",
        "setsid", "setuid", "setxattr", "splice", "eventfd", "statvfs", "sync", "sysconf", "tcgetpgrp", "tcsetpgrp",
        "ttyname", "uname", "wait", "wait3", "wait4", "waitid", "writev", "WNOHANG", "WIFSIGNALED", "WTERMSIG",
        "WEXITSTATUS",
    ),
}  # fmt: skip
_MODULES = {"darwin": (), "win32": ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "crypt")}
_VARIABLE = "RUNNERKIT_TEST_PLATFORM"
_NOT_IN_NAMES = set('<>:"|?*')


def import_libraries():
    import jinja2  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import numpy  # noqa: F401
    import pandas  # noqa: F401
    import torch.distributed.checkpoint
    import torch.utils.tensorboard  # noqa: F401
    import typer  # noqa: F401


def become(system):
    """Turn this process into a stand-in for "darwin" or "win32"; it cannot turn back."""
    vars(tempfile)["_os"] = _copy_of(os)  # it has other ways on Windows
    _refuse_proc()
    if system == "win32":
        _keep_windows_rules()
    whole = {id(module): _copy_of(module) for module in (os, signal)}
    for module in list(sys.modules.values()):  # what is imported keeps whole modules: it knows its own system
        for name, value in list(vars(module).items()):
            if id(value) in whole and module is not sys.modules[__name__]:
                vars(module)[name] = whole[id(value)]
        if module.__name__.startswith("multiprocessing"):
            vars(module)["sys"] = _copy_of(sys)
    if system == "win32":
        os.kill = _end
    for name in _SIGNALS[system]:
        if hasattr(signal, name):
            delattr(signal, name)
    for name in _OS[system]:
        if hasattr(os, name):
            delattr(os, name)
    for name in _MODULES[system]:
        sys.modules[name] = None  # an import raises ImportError
    sys.platform = system


def _copy_of(module):
    copy = type(sys)("copy")
    vars(copy).update(vars(module))
    return copy


def _end(process, number):
    assert process == os.getpid()
    os._exit(number)  # Windows ends the process, whatever its handler


def _refuse_proc():
    """Hide /proc and /dev/shm from Python's file functions."""
    for module, name in ((os, "open"), (os, "listdir"), (os, "scandir"), (io, "open"), (builtins, "open")):
        _guard(module, name, _check_not_proc)


def _check_not_proc(path, *_, **__):
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/dev/shm")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _keep_windows_rules():
    """Apply Windows' rules for open files, folders, file names, text files, links and signals."""
    list_folder, open_any = os.scandir.without_guard, open.without_guard
    shutil._use_fd_functions = False

    def used_files():
        """Return the files that this process has open or mapped."""
        used = set()
        for entry in list_folder("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the list itself
                used.add(os.readlink(entry.path))
        with open_any("/proc/self/maps") as lines:
            return used | {line.split(maxsplit=5)[5].strip() for line in lines if "/" in line}

    def check_closed(*paths, **_):
        for path in paths[:2]:
            if isinstance(path, str | os.PathLike) and os.path.lexists(path):
                full = os.path.realpath(path)
                if any(each == full or each.startswith(f"{full}/") for each in used_files()):
                    raise PermissionError(errno.EACCES, "The process cannot access the file, as it is open", str(path))

    def check_names(*paths, **_):
        for path in paths[:2]:
            if isinstance(path, str | os.PathLike) and _NOT_IN_NAMES & set(os.fspath(path)):
                raise OSError(errno.EINVAL, "The filename syntax is incorrect", str(path))

    def check_file(path, *_, **__):
        check_names(path)
        if isinstance(path, str | os.PathLike) and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def check_writable(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def refuse_link(*_, **__):
        raise OSError(errno.EPERM, "A required privilege is not held by the client")

    for name in ("replace", "rename", "unlink", "remove", "rmdir"):
        _guard(os, name, check_closed)
    for name in ("replace", "rename", "mkdir"):
        _guard(os, name, check_names)
    _guard(os, "open", check_file)
    _guard(os, "fsync", check_writable)
    _guard(os, "symlink", refuse_link)
    for module in (io, builtins):
        module.open = _windows_text(module.open)


def _guard(module, name, check):
    function = getattr(module, name)

    def guarded(*args, **kwargs):
        check(*args, **kwargs)
        return function(*args, **kwargs)

    guarded.without_guard = getattr(function, "without_guard", function)
    setattr(module, name, guarded)


def _windows_text(function):
    """Write text with Windows' line ends, and read and write it in its code page, unless the caller says otherwise."""

    def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *rest, **kwargs):
        is_written = bool(set(mode) & set("wax+"))
        if not isinstance(file, int) and is_written and _NOT_IN_NAMES & set(os.fspath(file)):
            raise OSError(errno.EINVAL, "Invalid argument", str(file))
        if not isinstance(file, int) and "b" not in mode:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            newline = "\r\n" if newline is None and is_written else newline
        return function(file, mode, buffering, encoding, errors, newline, *rest, **kwargs)

    opened.without_guard = getattr(function, "without_guard", function)
    return opened


if __name__ == "__mp_main__":  # a loader's worker, started by spawn
    become(os.environ[_VARIABLE])
elif __name__ == "__main__":
    _, os.environ[_VARIABLE], *sys.argv = sys.argv
    if sys.argv[0] == "--libraries":  # for a script that uses them
        sys.argv.pop(0)
        import_libraries()
    become(os.environ[_VARIABLE])
    runpy.run_path(sys.argv[0], run_name="__main__")
