"""Failing jobs: if one process fails, the whole job ends within seconds and reports that process's error."""

import functools
import os
import re
import signal
import socket
import threading
from dataclasses import dataclass

import pytest

from runnerkit import dl
from runnerkit.engines.failures.failure import describe
from tests.engines.failing_job import RAISE, failing_job
from tests.free_port import free_port
from tests.tiny import loader, train


@pytest.fixture
def job(tmp_path):
    """Return a function that starts a failing job in the test's own folder."""
    return functools.partial(failing_job, tmp_path)


# Horovod is installed for the slow tests only.
SLOW = [pytest.mark.horovod, pytest.mark.slow]
HOROVOD = pytest.param("Horovod", marks=SLOW)
KILLED = ("os.kill(os.getpid(), signal.SIGKILL)", "WorkerError: rank 1 of 2 was killed by SIGKILL")
# The process must end even if Python drops an exception that its signal handler raises.
TERMINATED_IN_A_FINALIZER = (
    'type("", (), {"__del__": lambda self: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.1))})()',
    "WorkerError: rank 1 of 2 exited with code 143",
)


@pytest.mark.parametrize("start", ["DDP", HOROVOD])
def test_an_exception_in_one_rank_ends_all_with_its_traceback_once(job, start):
    """The caller gets the exception itself, caused by the rank's traceback; the other ranks' errors are not shown."""
    with job(start, RAISE) as failing:
        errors = failing.finish()

    assert failing.process.returncode == 1
    assert "rank 1 of 2" in errors
    assert errors.count("in on_batch_end") == 1
    last_words = "ArithmeticError: rank one has had enough\nin batch 2 of loader 'train', epoch 2, rank 1: features"
    assert "\n".join(errors.splitlines()[-2:]).startswith(last_words)
    assert "closed by peer" not in errors.lower()
    assert "HorovodInternalError" not in errors


@pytest.mark.parametrize(
    "launcher", ["torchrun", *(pytest.param(each, marks=SLOW) for each in ("horovodrun", "mpirun"))]
)
def test_under_a_launcher_an_exception_in_one_rank_ends_all(job, launcher):
    """The launcher ends the job, and the failing rank's traceback is shown.

    Under torchrun, every rank that has time shows that traceback and nothing else; under Horovod's launchers it is
    shown once.
    """
    with job(launcher, RAISE) as failing:
        errors = failing.finish()

    assert failing.process.returncode != 0
    assert "ArithmeticError: rank one has had enough" in errors
    if launcher == "torchrun":
        assert "closed by peer" not in errors.lower()
    else:
        assert errors.count("ArithmeticError: rank one has had enough") == 1


@pytest.mark.parametrize(
    ("start", "trouble", "message"),
    [
        ("DDP", *KILLED),
        ("DDP", "os._exit(0)", "WorkerError: rank 1 of 2 exited with code 0"),
        ("DDP", *TERMINATED_IN_A_FINALIZER),
        pytest.param("Horovod", *KILLED, marks=SLOW),
    ],
)
def test_a_rank_that_dies_without_a_word_is_named(job, start, trouble, message):
    """After a kill or os._exit, the others stop waiting, and the message names the rank and what happened to it."""
    with job(start, trouble) as failing:
        errors = failing.finish()

    assert failing.process.returncode == 1
    assert message in errors
    assert "closed by peer" not in errors.lower()
    assert "HorovodInternalError" not in errors


@pytest.mark.parametrize(
    ("start", "exits", "code"),
    [
        ("DDP", "sys.exit()", 1),
        ("DDP", "sys.exit(3)", 3),  # the rank's own exit code
        ("torchrun", "sys.exit(0)", 1),
        pytest.param("Horovod", "sys.exit(0)", 1, marks=SLOW),
    ],
)
def test_sys_exit_in_the_middle_of_a_run_is_an_error(job, start, exits, code):
    """The job did not finish, so neither it nor the rank may report success."""
    with job(start, exits) as failing:
        errors = failing.finish()

    assert failing.process.returncode == code
    if code == 1:
        assert "rank 1 of 2 called sys.exit() before the run was over" in errors
        assert "in on_batch_end" in errors


@pytest.mark.parametrize(
    ("start", "kill"),
    [("DDP", os.kill), ("DDP", os.killpg), pytest.param("Horovod", os.kill, marks=SLOW)],
    ids=["parent alone", "whole process group", "parent alone, Horovod"],
)
def test_ctrl_c_ends_all(job, start, kill):
    """Only the calling process's KeyboardInterrupt is shown, and no process is left, whichever of them got the
    signal."""
    with job(start) as failing:
        kill(failing.process.pid, signal.SIGINT)
        errors = failing.finish()

    assert failing.process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("start", "how"),
    [("DDP", signal.SIGTERM), ("DDP", signal.SIGKILL), pytest.param("Horovod", signal.SIGKILL, marks=SLOW)],
)
def test_the_end_of_the_calling_process_ends_all(job, start, how):
    """After SIGTERM or SIGKILL, no orphans are left."""
    with job(start) as failing:
        failing.process.send_signal(how)
        failing.finish()

    assert failing.process.returncode == (143 if how == signal.SIGTERM else -signal.SIGKILL)


class Raises(dl.Callback):
    """A callback that raises in one rank and records that on_exception ran there."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_batch_end(self, runner):
        if runner.engine.rank == 1:
            raise LookupError("no such thing")

    def on_exception(self, runner):
        if runner.engine.rank == 1:
            self.path.write_text(repr(runner.exception))


class Unpicklable(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


def test_the_caller_can_catch_a_ranks_exception_by_its_own_type(tmp_path):
    """Every engine raises the original exception type, and on_exception runs in the rank that raised it."""
    path = tmp_path / "note"

    with pytest.raises(LookupError, match="no such thing") as caught:
        train(num_processes=2, callbacks=[Raises(path)])

    assert isinstance(caught.value.__cause__, dl.RankTraceback)
    assert caught.value.__cause__.rank == 1
    assert path.read_text() == "LookupError('no such thing')"


def test_an_exception_that_cannot_travel_arrives_as_text():
    """Its traceback is still the cause."""

    class Late(dl.Callback):
        def on_batch_end(self, runner):
            if runner.engine.rank == 0:
                raise Unpicklable("holds a lock")

    with pytest.raises(dl.WorkerError) as caught:
        train(num_processes=2, callbacks=[Late()])

    summary = "rank 0 of 2 failed: tests.engines.test_failures.Unpicklable: holds a lock\nin batch 1 of loader 'train'"
    assert str(caught.value).startswith(summary)
    assert "raise Unpicklable" in str(caught.value.__cause__)


@pytest.mark.parametrize("length", [200_000, 900_000, 10_000_000])
def test_a_long_message_is_cut(length):
    """It would be printed twice; its beginning and end are kept."""
    failure = describe(ValueError("begin" + length * "x" + "end"), rank=1, world_size=2)

    error = failure.as_exception()

    assert re.fullmatch(r"rank 1 of 2 failed: ValueError: beginx+ \[... \d+ characters ...\] x+end", str(error))
    assert len(str(error)) < 3_000 and len(str(error.__cause__)) < 30_000


class WithDefault(Exception):
    """An exception whose message is made from its arguments."""

    def __init__(self, code=0, *, hint="none"):
        super().__init__(f"code {code}, hint {hint}")
        self.code = code


class WithRequired(WithDefault):
    """An exception whose ``__init__`` does not accept its ``args``."""

    def __init__(self, *, code):
        super().__init__(code)


@dataclass
class WithFields(LookupError):
    """An exception whose ``args`` hold only what was passed by position."""

    code: int
    hint: str = ""


class WithErrno(OSError):
    """A subclass of an exception that is pickled in its own way."""

    def __init__(self, *, number=2):
        super().__init__(number, "not here", "a file")


@pytest.mark.parametrize(
    "error",
    [
        WithDefault(5, hint="a"), WithRequired(code=5), WithFields(5, hint="a"), WithErrno(number=2),
        OSError(2, "a"), KeyError("a"), UnicodeDecodeError("utf-8", b"a", 0, 1, "b"), ImportError("a", name="b"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_an_exception_arrives_with_its_type_message_and_attributes(error):
    """Its ``__init__`` is not called again, as it may not accept ``args``, or make another message of them."""
    error.add_note("in batch 1")

    arrived = describe(error, rank=1, world_size=2).as_exception()

    assert type(arrived) is type(error)
    assert (str(arrived), arrived.args, vars(arrived)) == (str(error), error.args, vars(error))
    for name in ("errno", "filename", "name", "reason"):
        assert getattr(arrived, name, None) == getattr(error, name, None)


def test_what_cannot_be_sent_is_named_by_its_path():
    """The error is raised before processes start."""

    class Holder(dl.Callback):
        def __init__(self):
            super().__init__()
            self.tools = {"lock": threading.Lock()}

    with pytest.raises(TypeError, match=r"^runner._given\.callbacks\['holder'\]\.tools\['lock'\] is a lock"):
        train(num_processes=2, callbacks={"holder": Holder()})


def test_a_port_that_is_taken_is_named():
    """The error is raised before processes start."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            train(engine=dl.DistributedDataParallelEngine(2, address="127.0.0.1", port=port))


def test_address_and_port_of_the_users_own_work():
    """Spawned processes use the user's address and port."""
    port = free_port()

    engine = dl.DistributedDataParallelEngine(2, address="127.0.0.1", port=port, device="cpu")
    runner = train(engine=engine, loaders={"train": loader(32, 4)})

    assert runner.batch_step == 4
