"""Tests of the status file, which tells programs how far a run is and how it ended."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jsonschema
import pytest
import torch

from runnerkit import dl, read_metrics
from runnerkit.commands.schema import schema_of
from runnerkit.loop import run_status
from runnerkit.storage import status_file
from runnerkit.storage.status_file import FILE, Status, describe, read_status
from tests.storage.stored_runs import At
from tests.tiny import loader, train

ROOT = Path(__file__).parents[1]
WORDS = "no answer from https://me:secret@host/x"
LOADERS = {"train": loader(16, 4), "valid": loader(8, 4)}


def status_of(logdir):
    """Read the file, after a check by its schema."""
    status = json.loads((Path(logdir) / FILE).read_text())
    jsonschema.validate(status, schema_of("status"))
    return status


def fail(words="broken"):
    raise RuntimeError(words)


def test_a_finished_run_tells_its_place_and_its_last_metrics(tmp_path):
    """Counters and metrics are those of the logs, and no thread remains."""
    before = datetime.now(UTC).replace(microsecond=0)

    train(loaders=LOADERS, num_epochs=3, accumulation_steps=2, logdir=tmp_path)

    status, table = status_of(tmp_path), read_metrics(tmp_path)
    last = table[table["epoch"] == 3]
    assert (status["state"], status["error"], status["stage"]) == ("finished", None, "train")
    assert (status["epoch"], status["stage_epoch"], status["num_epochs"]) == (3, 3, 3)
    assert (status["step"], status["optimizer_step"], status["num_steps"]) == (12, 6, 6)
    assert status["metrics"] == {
        key: dict(zip(rows["metric"], rows["value"], strict=True)) for key, rows in last.groupby("loader")
    }
    assert status["pid"] == os.getpid()
    times = [datetime.fromisoformat(status[key]) for key in ("started_at", "updated_at")]
    assert before <= times[0] <= times[1] <= datetime.now(UTC)
    assert "runnerkit-status" not in [each.name for each in threading.enumerate()]


def test_a_run_without_a_logdir_writes_none(tmp_path, monkeypatch):
    """Nor does its evaluation."""
    monkeypatch.chdir(tmp_path)

    train(loaders=LOADERS).evaluate_loader(loader=loader(8, 4), criterion=torch.nn.CrossEntropyLoss())

    assert list(tmp_path.iterdir()) == []


def test_an_exception_is_told_without_credentials(tmp_path):
    """The error has the type and the message; the place is that of the failure."""
    with pytest.raises(RuntimeError):
        train(loaders=LOADERS, num_epochs=3, logdir=tmp_path, callbacks=[At(lambda: fail(WORDS), step=6)])

    status, shown = status_of(tmp_path), "RuntimeError: no answer from https://***@host/x"
    assert (status["state"], status["epoch"], status["step"], status["loader"]) == ("failed", 2, 6, "train")
    assert status["error"]["type"] == "RuntimeError" and status["error"]["message"].startswith(shown)
    assert describe(status) == f"failed: {shown}"
    assert set(status["metrics"]) == {"train", "valid"}  # of the first epoch


def test_an_error_of_what_is_closed_last_is_told(tmp_path):
    """A run whose logger cannot be closed has failed, although its training has ended."""

    class Closing(dl.CSVLogger):
        def close(self):
            super().close()
            fail()

    with pytest.raises(RuntimeError):
        train(logdir=tmp_path, loggers={"csv": Closing(tmp_path)})

    assert status_of(tmp_path)["state"] == "failed"


@pytest.mark.parametrize(
    ("stop", "name"),
    [
        (lambda: signal.raise_signal(signal.SIGTERM), "Preempted"),
        (lambda: signal.raise_signal(signal.SIGINT), "Interrupted"),
        (lambda: sys.exit("enough"), "SystemExit"),
    ],
    ids=["SIGTERM", "Ctrl-C", "sys.exit"],
)
def test_a_stopped_run_is_not_a_failed_one(tmp_path, stop, name):
    """A stop request and sys.exit end in the state "stopped"; the resumed run finishes."""
    with pytest.raises(SystemExit):
        train(loaders=LOADERS, num_epochs=2, logdir=tmp_path, callbacks=[At(stop, step=3)])

    status = status_of(tmp_path)
    assert (status["state"], status["error"]["type"]) == ("stopped", name)

    train(loaders=LOADERS, num_epochs=2, logdir=tmp_path, resume="auto")

    assert (status_of(tmp_path)["state"], status_of(tmp_path)["step"]) == ("finished", 8)


KILLED = """
import os, signal, sys
from tests.storage.stored_runs import At
from tests.tiny import loader, train
train(loaders={"train": loader(16, 4)}, num_epochs=3, logdir=sys.argv[1],
      callbacks=[At(lambda: os.kill(os.getpid(), signal.SIGKILL), step=6)])
"""


def test_a_killed_run_stays_running_and_its_reader_knows_better(tmp_path):
    """The file has process, host and time of the last write; a reader on this machine sees that the process ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "run"], env=environment, check=False)

    status = status_of(tmp_path / "run")
    assert read_status(tmp_path / "run") == status  # it may be alive in a container with the name of this host

    status["updated_at"] = (datetime.now(UTC) - timedelta(seconds=20)).isoformat()
    (tmp_path / "run" / FILE).write_text(json.dumps(status))
    read = read_status(tmp_path / "run")

    assert killed.returncode == -signal.SIGKILL
    assert status["state"] == "running" and status["pid"] != os.getpid() and status["host"]
    assert read == {**status, "state": "killed"}
    assert describe(read).startswith(f"killed: process {status['pid']} has ended, last update {status['updated_at']}")


def read_of(logdir, pid, *, silent_s):
    """Return the state of a run of this machine that has not written for `silent_s`, as commands read it."""
    place = {"host": socket.gethostname(), "pid": pid}
    silent_since = datetime.now(UTC) - timedelta(seconds=silent_s)
    (logdir / FILE).write_text(json.dumps({"state": "running", **place, "updated_at": silent_since.isoformat()}))
    return read_status(logdir)["state"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_nobody_waited_for_and_one_with_the_same_number_are_not_the_run(tmp_path, monkeypatch):
    """A killed run stays a zombie until its parent waits for it; after a restart its number is another program's."""
    monkeypatch.setattr(status_file, "_QUIET_S", 0.0)
    with subprocess.Popen(["sleep", "60"]) as other:
        states = [read_of(tmp_path, other.pid, silent_s=silent_s) for silent_s in (100, 1)]
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        states.append(read_of(tmp_path, other.pid, silent_s=1))

    assert states == ["killed", "running", "killed"]


def test_a_run_of_another_machine_is_silent_after_a_while():
    """Its process cannot be looked for; the time of the last update tells."""
    status = {"state": "running", "host": "elsewhere", "pid": 1, "updated_at": "2026-01-01T00:00:00+00:00"}

    assert describe(status).startswith("running, but without an update for ")
    assert describe({**status, "updated_at": datetime.now(UTC).isoformat()}) == "running"


@pytest.mark.parametrize(("silent_s", "state"), [(100, "running"), (400, "unknown")])
def test_a_run_that_another_machine_has_lost_becomes_unknown(tmp_path, silent_s, state):
    """A reader does not wait for it for ever."""
    train(logdir=tmp_path)
    silent_since = datetime.now(UTC) - timedelta(seconds=silent_s)
    status = {**status_of(tmp_path), "state": "running", "host": "elsewhere", "updated_at": silent_since.isoformat()}
    (tmp_path / FILE).write_text(json.dumps(status))

    read = read_status(tmp_path)

    assert read == {**status, "state": state}
    assert describe(read).startswith(state) and "without an update for" in describe(read)
    jsonschema.validate(read, schema_of("status"))


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_file_is_updated_within_a_pass(tmp_path, monkeypatch):
    """A thread writes the step of a pass under way, so a step does not have to."""
    monkeypatch.setattr(run_status, "EVERY_S", 0.01)
    seen = []

    def wait():
        wait_for(lambda: status_of(tmp_path)["step"] == 3)
        seen.append(status_of(tmp_path))

    train(loaders=LOADERS, logdir=tmp_path, callbacks=[At(wait, step=3)])

    assert [(each["state"], each["loader"], each["epoch"]) for each in seen] == [("running", "train", 1)]


def test_an_evaluation_within_a_run_does_not_show_as_its_place(tmp_path, monkeypatch):
    """The counters of the runner are the evaluation's then, and its attributes are exchanged before and after."""
    monkeypatch.setattr(run_status, "EVERY_S", 0.01)
    places = set()

    class Slow(dl.Callback):
        def on_batch_end(self, runner):
            before = (tmp_path / FILE).stat().st_mtime_ns
            wait_for(lambda: (tmp_path / FILE).stat().st_mtime_ns != before)
            status = status_of(tmp_path)
            places.add((status["state"], status["stage"], status["loader"], status["step"]))

    def evaluate():
        wait_for(lambda: status_of(tmp_path)["step"] == 3)
        runner.evaluate_loader(loader=loader(8, 4), callbacks=[Slow(dl.CallbackOrder.External)])

    runner = dl.SupervisedRunner()
    train(runner=runner, loaders=LOADERS, logdir=tmp_path, callbacks=[At(evaluate, step=3)])

    assert places == {("running", "train", "train", 3)}
    assert status_of(tmp_path)["state"] == "finished"


def test_attributes_that_are_being_exchanged_do_not_end_the_updates(tmp_path, monkeypatch):
    """After an evaluation, the runner has none of its attributes for a moment."""
    monkeypatch.setattr(run_status, "EVERY_S", 0.01)

    def exchange():
        kept = dict(vars(runner))
        vars(runner).clear()
        before = (tmp_path / FILE).stat().st_mtime_ns
        wait_for(lambda: (tmp_path / FILE).stat().st_mtime_ns != before)
        vars(runner).update(kept)
        wait_for(lambda: status_of(tmp_path)["step"] == 3)

    runner = dl.SupervisedRunner()
    train(runner=runner, loaders=LOADERS, logdir=tmp_path, callbacks=[At(exchange, step=3)])

    assert status_of(tmp_path)["state"] == "finished"


def test_a_step_does_not_write(tmp_path, monkeypatch):
    """Between its start and its end, a run writes the file in the thread only, every few seconds."""
    writers = []
    write = Status.write
    monkeypatch.setattr(Status, "write", lambda *args: (writers.append(threading.current_thread()), write(*args)))

    train(loaders=LOADERS, num_epochs=5, logdir=tmp_path)

    assert run_status.EVERY_S >= 2
    assert writers.count(threading.main_thread()) == 2


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    """One warning names the file."""

    def full(status, logdir):
        raise OSError("the disk is full")

    monkeypatch.setattr(Status, "write", full)
    with caplog.at_level(logging.WARNING):
        train(logdir=tmp_path, num_epochs=2)

    assert [each.getMessage() for each in caplog.records] == [f"{tmp_path / FILE} was not written: the disk is full"]


def test_a_refused_run_leaves_the_file_as_it_was(tmp_path):
    """A second run in the logdir of a finished one raises and writes nothing."""
    train(logdir=tmp_path)
    before = (tmp_path / FILE).read_bytes()

    with pytest.raises(FileExistsError):
        train(logdir=tmp_path)

    assert (tmp_path / FILE).read_bytes() == before


def test_a_link_is_replaced_and_its_target_is_not_written(tmp_path):
    """As other files of a logdir, the status is not written to where a link leads."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).symlink_to(tmp_path / "victim")

    train(logdir=tmp_path / "run")

    assert (tmp_path / "victim").read_text() == "precious"
    assert status_of(tmp_path / "run")["state"] == "finished"


def test_a_number_that_is_not_finite_is_a_string(tmp_path):
    """Strict JSON does not have NaN."""

    class Infinite(dl.Callback):
        def on_loader_end(self, runner):
            runner.loader_metrics["odd"] = float("inf")

    train(logdir=tmp_path, callbacks=[Infinite()])

    assert status_of(tmp_path)["metrics"]["train"]["odd"] == "Infinity"


def test_an_error_that_utf8_cannot_hold_is_told(tmp_path):
    """Names of files may contain any bytes; the last state is written nevertheless."""
    with pytest.raises(RuntimeError):
        train(logdir=tmp_path, callbacks=[At(lambda: fail("no file caf\udce9"), step=2)])

    assert status_of(tmp_path)["error"]["message"].startswith("RuntimeError: no file caf?")


class FailsOnOther(dl.Callback):
    """A callback that raises in the second process."""

    def on_batch_end(self, runner):
        if runner.engine.rank == 1 and runner.batch_step == 2:
            fail("rank 1 is broken")


def test_the_failure_of_another_process_is_told(tmp_path):
    """Rank zero learns of it and writes it."""
    with pytest.raises(RuntimeError, match="rank 1 is broken"):
        train(num_processes=2, loaders=LOADERS, num_epochs=50, logdir=tmp_path, callbacks=[FailsOnOther()])

    assert status_of(tmp_path)["state"] == "failed"
