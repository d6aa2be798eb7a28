"""A server process that has imported torch, from which tests fork their processes.

Importing torch, runnerkit and the tests' libraries takes several seconds of a core; forking a process that has imported
them takes hundredths of a second. While :meth:`WarmPython.patched` is active, `subprocess` forks every command
``[sys.executable, SCRIPT | -m MODULE | -c CODE, ...]``, started by a test, the library or torchrun's agent. The child's
parent is the caller; arguments, environment, working directory, open files, session, process group, signals and exit
code are those of a newly started process.

Differences: modules are already imported, which can hide a missing import; all forks share the hash seed; globals are
not finalized at exit; umask, resource limits and ``/proc/PID/environ`` are those of the server; and a script has a
server among its children. Tests for which this matters have the mark `cold`, which disables forking.

The server replaces a private method of `subprocess` through which all code, torch included, starts processes.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
# Modules that many tests import and that load slowly. None may start a thread, which a fork would lose.
PRELOADED = (
    "torch", "torch.distributed.run", "torch.utils.tensorboard", "torchmetrics.classification",
    "torchmetrics.regression", "pandas", "sklearn.metrics", "psutil", "pytest", "cloudpickle", "runnerkit.dl",
    "runnerkit.utils", "runnerkit.commands.cli", "runnerkit.engines.launch.worker", "tests.tiny",
)  # fmt: skip
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # prctl(2)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# A fork applies the first two; the third changes no behavior. Python reads all other PYTHON* variables at its start.
_HEEDED = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}


def _read_at_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON") and name not in _HEEDED}


_OF_THE_SERVER = _read_at_the_start(os.environ)

_execute_child: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_execute_child)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class WarmPython:
    """Client of the forking server, which starts at the first use and ends with this process."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.server_pid = 0
        self._owner = os.getpid()
        self._connection = connection
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Make `subprocess` fork all commands that can be forked."""
        self.patch()
        try:
            yield
        finally:
            subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]

    def patch(self) -> None:
        """Make `subprocess` fork all commands that can be forked, permanently."""

        def execute_child(popen: Any, *arguments: Any) -> None:
            given = _parameters.bind(popen, *arguments).arguments
            # The kernel cannot make a process that was forked by other means, such as a loader's worker, the parent.
            if os.getpid() != self._owner or not _can_fork(given):
                _execute_child(popen, *arguments)
                return
            popen.pid = self._fork(given)
            popen._child_created = True
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            popen._close_pipe_fds(*(given[name] for name in names))

        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the server, if it was started."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fork(self, given: Mapping[str, Any]) -> int:
        pipes = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        descriptors = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)] + list(given["pass_fds"])
        request = {
            "parent": os.getpid(),
            "arguments": [os.fspath(each) for each in given["args"]],
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "descriptors": [0, 1, 2, *given["pass_fds"]],
            "session": bool(given["start_new_session"]),
            "group": given["process_group"],
        }
        data = json.dumps(request).encode()
        with self._lock:
            connection = self._connect()
            # The server's child exits at once, and the kernel makes us the parent of its child.
            _prctl(_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(connection, [struct.pack("I", len(data))], descriptors)
                connection.sendall(data)
                answer = connection.recv(4)
            finally:
                _prctl(_CHILD_SUBREAPER, 0)
        if len(answer) != 4:
            raise RuntimeError("the warm Python has died: see its traceback in the output of pytest -s")
        return int(struct.unpack("I", answer)[0])

    def _connect(self) -> socket.socket:
        if self._connection is None:
            self._connection, theirs = socket.socketpair()
            with theirs:
                environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
                # Without -P: forks would inherit it, and a notebook's kernel would omit its own folder from sys.path.
                code = f"import sys; sys.path[0] = {str(ROOT)!r}; from tests.warm_python import main; main()"
                command = [sys.executable, "-c", code, str(theirs.fileno())]
                environment["OPENBLAS_NUM_THREADS"] = "1"  # no thread pool
                _while_this_process_lives(lambda: self._start(command, theirs.fileno(), environment))
        return self._connection

    def _start(self, command: list[str], connection: int, environment: dict[str, str]) -> None:
        server = _ColdPopen(command, stdin=subprocess.DEVNULL, pass_fds=[connection], env=environment)
        self.server_pid = server.pid


def _while_this_process_lives(start: Callable[[], None]) -> None:
    """Call `start` in a thread that does not end: the kernel kills the server with the thread that started it."""
    if threading.current_thread() is threading.main_thread():
        start()
        return
    has_started = threading.Event()

    def run() -> None:
        start()
        has_started.set()
        threading.Event().wait()

    threading.Thread(target=run, daemon=True).start()
    has_started.wait(timeout=60)


class _ColdPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Popen without the patch; it is not waited for, because the process ends with its parent."""

    _execute_child = _execute_child

    def __del__(self) -> None:
        pass


def _can_fork(given: Mapping[str, Any]) -> bool:
    arguments, environment = given["args"], os.environ if given["env"] is None else given["env"]
    return (
        sys.platform == "linux"
        and isinstance(arguments, list | tuple)
        and given["executable"] is None
        and _is_this_python(os.fspath(arguments[0]), environment)
        and _parse([os.fspath(each) for each in arguments]) is not None
        and not given["shell"]
        and given["preexec_fn"] is None
        and given["gid"] is given["gids"] is given["uid"] is None
        and given["umask"] < 0
        and _read_at_the_start(environment) == _OF_THE_SERVER
    )


def _is_this_python(program: str, environment: Mapping[str, str]) -> bool:
    if program == "python":
        program = shutil.which(program, path=environment.get("PATH")) or ""
    return program in (sys.executable, os.path.join(os.path.dirname(sys.executable), "python"))


def _parse(command: Sequence[str]) -> tuple[str, list[str], bool] | None:
    """Split a command into its kind ("-c", "-m" or ""), its words and whether output is unbuffered."""
    words = list(command[1:])
    is_unbuffered = words[:1] == ["-u"]
    del words[: int(is_unbuffered)]
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return None
    return (words.pop(0) if words[0] in ("-c", "-m") else ""), words, is_unbuffered


def main() -> NoReturn:
    """Serve requests on the socket whose descriptor is the last argument."""
    connection = socket.socket(fileno=int(sys.argv[-1]))
    base = sys.path[1:]
    importlib.import_module("runnerkit.torchvision_cpu").import_torchvision()
    for name in PRELOADED:
        importlib.import_module(name)
    for name, _ in sys.modules["runnerkit.support.stub_names"].imports_of_stub("runnerkit.dl"):  # loads its module
        getattr(sys.modules["runnerkit.dl"], name)
    gc.collect()
    gc.freeze()  # garbage collection in a child would copy all these pages
    others = [path for path in Path("/proc/self/task").iterdir() if path.name != str(os.getpid())]
    names = {path.joinpath("comm").read_text().strip() for path in others}
    # pyarrow's jemalloc restarts its thread in a fork.
    assert names <= {"jemalloc_bg_thd"}, f"a fork would lose the threads {names}: remove their library from PRELOADED"
    while True:
        request, descriptors = _serve(connection)
        connection.close()
        _become(request, descriptors, base)
        if any(
            "runnerkit.engines.launch.worker" in each for each in request["arguments"]
        ):  # ranks do not start Python processes
            break
        # The child gets its own server, because the kernel makes only ancestors the parent of an orphan.
        ours, connection = socket.socketpair()
        if os.fork():
            connection.close()
            WarmPython(ours).patch()
            break
        ours.close()
    _run(request["arguments"])


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; return the request and its open files in the requested child."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # they are meant for the client
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
        if len(head) < 4:
            os._exit(0)
        data, size = b"", struct.unpack("I", head)[0]
        while len(data) < size:
            data += connection.recv(size - len(data))
        request = json.loads(data)
        if child := os.fork():
            os.waitpid(child, 0)
            for descriptor in descriptors:
                os.close(descriptor)
        elif os.fork():
            os._exit(0)
        else:
            return _adopted(request, connection), descriptors


def _adopted(request: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
    """Wait until the caller is the parent, reset the signal handlers and send the caller the process id."""
    deadline = time.monotonic() + 60
    while os.getppid() != request["parent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    connection.sendall(struct.pack("I", os.getpid()))
    return request


def _become(request: dict[str, Any], descriptors: Sequence[int], base: Sequence[str]) -> None:
    """Apply the request's open files, folder, environment and import path to this process."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, 500) for each in descriptors]  # avoids clashes with the target numbers
    for each in descriptors:
        os.close(each)
    for each, number in zip(high, request["descriptors"], strict=True):
        os.dup2(each, number)
        os.close(each)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    search_path = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [*filter(None, search_path.split(os.pathsep)), *base]
    importlib.invalidate_caches()
    if str(ROOT) not in sys.path:
        for name in [each for each in sys.modules if each.split(".")[0] == "tests"]:
            del sys.modules[name]
    # State that libraries initialize at import.
    torch = sys.modules["torch"]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    torch.distributed.set_debug_level_from_env()
    sys.modules["numpy"].random.seed()
    sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def _open_streams(is_unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(number, "wb", closefd=False)
        stream = io.TextIOWrapper(
            raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
            errors=errors,
            line_buffering=number == 2 or raw.isatty(),
            write_through=is_unbuffered or number == 2,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(command: Sequence[str]) -> NoReturn:
    """Run a command line as the interpreter does, in a new module __main__."""
    kind, words, is_unbuffered = _parse(command)  # type: ignore[misc]
    _open_streams(is_unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.orig_argv[:], sys.argv = list(command), [kind, *words[1:]] if kind else words
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    try:
        if kind == "-m":
            sys.path.insert(0, os.getcwd())
            sys.modules.pop(words[0], None)
            runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
        elif kind == "-c":
            sys.path.insert(0, "")
            exec(compile(words[0], "<string>", "exec"), main.__dict__)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
            main.__file__ = os.path.abspath(words[0])
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException as error:
        own = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(own and own.tb_next), own and own.tb_next)
        _leave(1, is_interrupted=isinstance(error, KeyboardInterrupt))
    _leave(0)


def _leave(code: int, *, is_interrupted: bool = False) -> NoReturn:
    """Exit like the interpreter, but without destroying modules, which would copy all pages of the server."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)
