"""Tests that processes forked from the warm Python, which has imported torch, behave like newly started ones."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.warm_python import WarmPython

IS_FORKED = "import sys; print('torch' in sys.modules)"
DESCRIBE = """
import json, os, signal, sys
torch = sys.modules.get("torch")  # a newly started process would import it for seconds
print(json.dumps({
    "arguments": sys.argv, "folder": os.getcwd(), "parent": os.getppid(), "session": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0) == os.getpid(), "variable": os.environ.get("A_VARIABLE"), "path": sys.path[0],
    "name": __name__, "file": globals().get("__file__"), "threads": torch and torch.get_num_threads(),
    "names": sorted(name for name in vars(sys.modules["__main__"]) if not name.startswith("__")),
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    "unbuffered": sys.stdout.write_through,
}))
"""


def run(*command, **kwargs):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, **kwargs)


def described(*command, **kwargs):
    done = run(*command, **kwargs)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def environment(**variables):
    """Return this environment without variables that change how Python starts."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | variables


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(DESCRIBE)
    return path


@pytest.fixture(params=["warm", pytest.param("cold", marks=pytest.mark.cold)])
def either(request):
    """Run the test with forked and with newly started processes."""
    return request.param


def test_a_process_is_forked_unless_its_test_is_marked_cold(either):
    """A process is forked, with torch imported, unless its test is marked cold."""
    assert run("-c", IS_FORKED).stdout == f"{either == 'warm'}\n"


def test_a_script_gets_its_place_in_the_world(either, script, tmp_path):
    """A script gets its arguments, folder, variables, parent, sys.path, threads, signals and a new module __main__."""
    seen = described(str(script), "a", "-b", cwd=tmp_path, env=environment(A_VARIABLE="é", OMP_NUM_THREADS="2"))

    assert seen["arguments"] == [str(script), "a", "-b"]
    assert seen["folder"] == seen["path"] == str(tmp_path)
    assert seen["variable"] == "é" and seen["threads"] == (2 if either == "warm" else None)
    assert seen["parent"] == os.getpid()
    assert (seen["name"], seen["file"]) == ("__main__", str(script))
    assert seen["names"] == ["json", "os", "signal", "sys", "torch"]
    assert seen["sigint"] and seen["sigterm"]
    assert not seen["session"] and not seen["group"] and not seen["unbuffered"]


def test_sessions_groups_and_unbuffered_output_are_as_asked(either, script):
    """start_new_session, process_group and -u take effect."""
    session = described("-u", str(script), start_new_session=True, env=environment())
    group = described(str(script), process_group=0, env=environment(PYTHONUNBUFFERED="1"))

    assert (session["session"], session["group"], session["unbuffered"]) == (True, True, True)
    assert (group["session"], group["group"], group["unbuffered"]) == (False, True, True)


def test_code_and_modules_run_as_with_c_and_m(either, tmp_path):
    """Code and modules run with the sys.argv and sys.path of `-c` and `-m`."""
    (tmp_path / "a_module.py").write_text(DESCRIBE)

    code, module = described("-c", DESCRIBE, "x"), described("-m", "a_module", "x", cwd=tmp_path)

    assert (code["arguments"], code["path"]) == (["-c", "x"], "")
    assert module["arguments"] == [str(tmp_path / "a_module.py"), "x"]
    assert (module["path"], module["name"]) == (str(tmp_path), "__main__")


@pytest.mark.parametrize(
    ("code", "returncode", "error"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(75)", 75, ""),
        ("raise SystemExit('a reason')", 1, "a reason\n"),
        ("1 / 0", 1, 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nZeroDivisionError'),
        ("import os; os._exit(3)", 3, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "Traceback"),
        ("import atexit; atexit.register(print, 'bye'); print('out', end=' ')", 0, ""),
    ],
)
def test_it_ends_as_it_says(either, code, returncode, error):
    """Exit codes, signals, tracebacks and atexit functions are those of a newly started process."""
    done = run("-c", code)

    assert done.returncode == returncode
    assert done.stderr.startswith(error) and bool(done.stderr) == bool(error)
    assert done.stdout == ("out bye\n" if "atexit" in code else "")


def test_what_a_fork_cannot_do_is_started():
    """Commands with options or variables that Python reads only at its start are started, not forked."""
    assert run("-X", "utf8", "-c", IS_FORKED).stdout == "False\n"
    assert run("-c", IS_FORKED, env={**os.environ, "PYTHONWARNINGS": "ignore"}).stdout == "False\n"
    assert subprocess.run(["true"], check=True).returncode == 0


@pytest.mark.slow
def test_the_server_outlives_the_thread_that_first_needed_it():
    """The kernel would kill it with that thread."""
    warm = WarmPython()
    try:
        with warm.patched():
            thread = threading.Thread(target=run, args=("-c", ""))
            thread.start()
            thread.join()
            assert run("-c", IS_FORKED).stdout == "True\n"
    finally:
        warm.close()
