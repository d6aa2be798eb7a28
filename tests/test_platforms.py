"""Tests of macOS and Windows: one process trains there as it does here, and what needs another system says so."""

import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from runnerkit import dl
from runnerkit.engines.failures.watchdog import is_needed
from runnerkit.engines.launch import network
from runnerkit.engines.launch.exit_on_signal import ExitOnSignal
from runnerkit.storage.logdir_lock import is_held, lock
from runnerkit.support.platform import replace, signals
from tests import platform_job
from tests.tiny import train

ROOT = Path(__file__).parents[1]
OTHERS = ("darwin", "win32")


def run_on(system, script, *arguments, libraries=False, folder):
    command = [sys.executable, "-m", "tests.platform_stand_in", system, *(["--libraries"] if libraries else [])]
    command += [ROOT / "tests" / script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.cold
def test_the_stand_in_keeps_the_rules_of_windows(tmp_path):
    """Otherwise the tests below would prove nothing."""
    done = run_on("win32", "platform_rules.py", folder=tmp_path)

    expected = ["replace PermissionError", "unlink PermissionError", r"bytes b'\xe9\r\n'", "folder PermissionError"]
    expected += ["sync OSError", "name OSError OSError", "text UnicodeEncodeError", "link PermissionError"]
    expected += ["proc FileNotFoundError", "fcntl ModuleNotFoundError", "names [False, False, False, False, False]"]
    assert done.stdout.splitlines() == [*expected, "system win32", "closed False"], done.stderr


@pytest.mark.cold
@pytest.mark.parametrize("system", OTHERS)
def test_every_public_name_is_imported(system, tmp_path):
    """No module needs at its import what only Linux has."""
    done = run_on(system, "platform_names.py", folder=tmp_path)

    assert done.returncode == 0 and int(done.stdout) > 150, done.stderr


@pytest.fixture(scope="module")
def results_here(tmp_path_factory):
    """The results of the job on this machine as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("linux"))
        patch.setattr(sys, "argv", ["pytest"])
        return json.loads(json.dumps(platform_job.main(num_workers=0)))


@pytest.mark.cold
@pytest.mark.slow
@pytest.mark.parametrize(("system", "num_workers"), [("darwin", 1), ("win32", 1)])
def test_one_process_gives_the_same_results(system, num_workers, tmp_path, results_here):
    """Training, Ctrl-C, resume, evaluation, prediction files, logs, byte by byte, and reports; workers are spawned."""
    done = run_on(system, "platform_job.py", num_workers, libraries=True, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == results_here
    assert ("is not locked, which needs Linux or macOS" in done.stderr) == (system == "win32")


@pytest.mark.parametrize(
    "kind", [dl.DistributedDataParallelEngine, dl.FullyShardedDataParallelEngine, dl.HorovodEngine]
)
def test_several_processes_are_refused_on_windows(monkeypatch, kind):
    """The error comes before any process starts, and names the alternatives."""
    sysconfig.get_config_vars()  # looks for a module that is named after the platform
    monkeypatch.setattr(sys, "platform", "win32")

    with pytest.raises(RuntimeError, match="processes that train together need Linux or macOS: on Windows, train in"):
        train(engine=kind(2, device="cpu"))


def test_a_logdir_is_not_locked_on_windows(monkeypatch, caplog, tmp_path):
    """A warning says so; the folder is created, and a file in its place is an error, as elsewhere."""
    monkeypatch.setattr(sys, "platform", "win32")
    logdir, file = tmp_path / "logs", tmp_path / "file"
    file.touch()

    unlock = lock(logdir)
    unlock()

    assert logdir.is_dir() and not list(logdir.iterdir()) and not is_held(logdir)
    assert "is not locked, which needs Linux or macOS: make sure that no other run writes there" in caplog.text
    with pytest.raises(OSError, match="it is a file; choose another one"):
        lock(file)


def test_the_memory_of_a_process_is_left_out_on_windows(monkeypatch, caplog):
    """The other system metrics are logged, and one warning says what is missing."""
    monkeypatch.setattr(sys, "platform", "win32")
    runner = train(callbacks=[dl.SystemMetricsCallback()])

    logged = {name for name in runner.epoch_metrics["train"] if name.startswith("_system")}
    assert logged == {"_system/samples_per_s", "_system/step_s", "_system/data_wait_share"}
    assert caplog.text.count("_system/memory_gib is not available: the peak memory of a process needs Linux or") == 1


@pytest.mark.parametrize(("system", "expected"), [("linux", True), ("darwin", False)])
def test_torchrun_is_watched_on_linux_only(monkeypatch, caplog, system, expected):
    """Elsewhere a warning says what to do if the machine is cut off."""
    monkeypatch.setattr(sys, "platform", system)
    variables = {"TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert is_needed() is expected
    assert ("torchrun is not watched, which needs Linux" in caplog.text) is not expected


def test_only_linux_finds_the_network_interface(monkeypatch, caplog):
    """Between machines a warning names the variable; on one machine gloo gets the loopback of macOS."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv(network.INTERFACE_VARIABLE, "")  # so that it is restored, whatever the code sets
    monkeypatch.delenv(network.INTERFACE_VARIABLE)
    store = SimpleNamespace(set=lambda key, value: None, multi_get=lambda keys: [b"192.0.2.1", b"192.0.2.2"])

    with caplog.at_level(logging.WARNING):
        network.set_gloo_interface(store, rank=0, world_size=2, host="127.0.0.1")
    told = os.environ.get(network.INTERFACE_VARIABLE)
    network.set_gloo_loopback()

    assert told is None and "set GLOO_SOCKET_IFNAME to its name" in caplog.text
    assert os.environ[network.INTERFACE_VARIABLE] == "lo0"


_CHILD = """
import sys, time
sys.platform = "darwin"
from runnerkit.engines.launch.parent import die_with_parent
die_with_parent()
print("watching", flush=True)
time.sleep(60)
"""
_PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""


def test_a_process_ends_with_its_killed_parent_on_macos():
    """Without prctl, a thread looks for the parent."""
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, _CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "watching\n"

    parent.kill()
    parent.wait()
    since = time.monotonic()
    rest = parent.stdout.read()  # ends when the child has ended
    parent.stdout.close()

    assert rest == "" and time.monotonic() - since < 10


def test_signals_that_do_not_exist_are_left_out(monkeypatch):
    """Windows has neither SIGHUP nor SIGUSR1."""
    for name in ("SIGHUP", "SIGUSR1"):
        monkeypatch.delattr(signal, name)
    before = signal.getsignal(signal.SIGTERM)
    handler = ExitOnSignal()

    handler.install()
    during = signal.getsignal(signal.SIGTERM)
    handler.remove()

    assert signals("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT") == (signal.SIGTERM, signal.SIGINT)
    assert during is handler and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("system", "num_tries"), [("win32", 3), ("linux", 1)])
def test_windows_waits_for_programs_that_have_a_file_open(monkeypatch, tmp_path, system, num_tries):
    """A virus scanner or a plot holds a file for moments; elsewhere a refusal is final."""
    monkeypatch.setattr(sys, "platform", system)
    new, old, tries = tmp_path / "new", tmp_path / "old", []
    new.touch()
    really = os.replace

    def refused_twice(source, target):
        tries.append(source)
        if len(tries) < 3:
            raise PermissionError(errno.EACCES, "Access is denied")
        really(source, target)

    monkeypatch.setattr(os, "replace", refused_twice)
    with contextlib.suppress(PermissionError):
        replace(new, old)

    assert len(tries) == num_tries and old.exists() == (system == "win32")
