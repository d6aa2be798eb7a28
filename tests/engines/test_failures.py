"""It ends: whatever happens to one process, the whole job ends within seconds, with that process's own words."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, quiet, sgd

LIMIT_S = 10
SCRIPT = textwrap.dedent(
    """
    import os, signal, sys, time
    from torch import nn
    from runnerkit import dl
    from tests.tiny import loader, mlp, sgd

    class Trouble(dl.Callback):
        def on_batch_end(self, runner):
            if runner.epoch_step == 2 and runner.loader_batch_step == 2 and runner.engine.rank == 1:
                {trouble}
            if runner.epoch_step == 2 and runner.loader_batch_step == 1:
                os.write(1, f"ready {{runner.engine.rank}} {{os.getpid()}}\\n".encode())  # one write, one line

    model = mlp()
    dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model),
        loaders={{"train": loader(400, 2, num_workers=1)}},
        callbacks=[Trouble()], num_epochs=1000, ddp=True, cpu=True, loggers={{"console": None}},
    )
    """
)


@pytest.fixture
def start(tmp_path):
    """Start the script with its trouble; whatever is left of it when the test ends is killed."""
    started = []

    def start_script(trouble, *, launcher=()):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(trouble=trouble))
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
        )
        started.append(process)
        return process

    yield start_script
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.stderr.close()
        process.wait()


def wait_until_ready(process, num_ranks=2):
    """Return pids of the ranks, by rank, once all are training."""
    pids = {}
    while len(pids) < num_ranks:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if line.startswith("ready"):
            _, rank, pid = line.split()
            pids[int(rank)] = int(pid)
    return pids


def finish(process):
    """Return (seconds, stderr); fails when the job does not end."""
    begin = time.monotonic()
    _, errors = process.communicate(timeout=60)
    return time.monotonic() - begin, errors


def assert_nobody_is_left(pids):
    deadline = time.monotonic() + LIMIT_S
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def family(process):
    return [each.pid for each in psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.slow
def test_an_exception_in_one_rank_ends_all_with_its_traceback_once(start):
    """The caller sees the exception itself, caused by the rank's traceback; the others' complaints are not shown."""
    process = start('raise ArithmeticError("rank one has had enough")')
    wait_until_ready(process)
    pids = family(process)

    seconds, errors = finish(process)

    assert process.returncode == 1
    assert seconds < LIMIT_S
    assert "rank 1 of 2" in errors
    assert errors.count("in on_batch_end") == 1
    last_words = "ArithmeticError: rank one has had enough\nin batch 2 of loader 'train', epoch 2, rank 1: features"
    assert "\n".join(errors.splitlines()[-2:]).startswith(last_words)
    assert "closed by peer" not in errors.lower()
    assert_nobody_is_left(pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 of 2 was killed by SIGKILL"),
        ("os._exit(7)", "rank 1 of 2 exited with code 7"),
        ("os._exit(0)", "rank 1 of 2 exited with code 0"),
    ],
)
def test_a_rank_that_dies_without_a_word_is_named(start, trouble, message):
    """Killed, or gone by os._exit: the others wait for it no longer, and the message says what happened to whom."""
    process = start(trouble)
    wait_until_ready(process)
    pids = family(process)

    seconds, errors = finish(process)

    assert process.returncode == 1
    assert seconds < LIMIT_S
    assert message in errors
    assert "closed by peer" not in errors.lower()
    assert_nobody_is_left(pids)


@pytest.mark.slow
@pytest.mark.parametrize("everybody", [False, True], ids=["parent alone", "whole process group"])
def test_ctrl_c_ends_all(start, everybody):
    """One KeyboardInterrupt, the calling process's; nobody is left, whoever else got the signal."""
    process = start("pass")
    wait_until_ready(process)
    pids = family(process)

    (os.killpg if everybody else os.kill)(process.pid, signal.SIGINT)
    seconds, errors = finish(process)

    assert process.returncode == -signal.SIGINT
    assert seconds < LIMIT_S
    assert errors.count("Traceback") == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert_nobody_is_left(pids)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_calling_process_ends_all(start, how):
    """Ended politely or not at all politely, it leaves no orphans."""
    process = start("pass")
    wait_until_ready(process)
    pids = family(process)

    process.send_signal(how)
    seconds, _ = finish(process)

    assert process.returncode == (143 if how == signal.SIGTERM else -signal.SIGKILL)
    assert seconds < LIMIT_S
    assert_nobody_is_left(pids)


@pytest.mark.slow
def test_under_torchrun_an_exception_in_one_rank_ends_all(start):
    """The launcher ends the job; each rank that has the time shows the failing rank's traceback, and nothing else."""
    process = start('raise ArithmeticError("rank one has had enough")', launcher=TORCHRUN)
    wait_until_ready(process)
    pids = family(process)

    seconds, errors = finish(process)

    assert process.returncode != 0
    assert seconds < LIMIT_S
    assert "ArithmeticError: rank one has had enough" in errors
    assert "closed by peer" not in errors.lower()
    assert_nobody_is_left(pids)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class Raises(dl.Callback):
    """Raises in one rank, and notes that on_exception ran there."""

    def __init__(self, path, error):
        super().__init__()
        self.path, self.error = path, error

    def on_batch_end(self, runner):
        if runner.engine.rank == 1:
            raise self.error

    def on_exception(self, runner):
        if runner.engine.rank == 1:
            self.path.write_text(repr(runner.exception))


class Unpicklable(Exception):
    """Holds what cannot travel."""

    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


def train(**kwargs):
    model = mlp()
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        **{"loaders": {"train": loader(32, 4)}, "ddp": True, "cpu": True, **quiet(), **kwargs},
    )


def test_the_caller_can_catch_a_ranks_exception_by_its_own_type(tmp_path):
    """Any engine, the same exceptions; and on_exception ran where it was raised."""
    path = tmp_path / "note"

    with pytest.raises(LookupError, match="no such thing") as caught:
        train(callbacks=[Raises(path, LookupError("no such thing"))])

    assert isinstance(caught.value.__cause__, dl.RankTraceback)
    assert caught.value.__cause__.rank == 1
    assert path.read_text() == "LookupError('no such thing')"


def test_an_exception_that_cannot_travel_arrives_as_text(tmp_path):
    """Its traceback is the cause all the same."""

    class Late(dl.Callback):
        def on_batch_end(self, runner):
            raise Unpicklable("holds a lock")

    with pytest.raises(dl.WorkerError) as caught:
        train(callbacks=[Late()])

    assert "holds a lock" in str(caught.value.__cause__)


def test_what_cannot_be_sent_is_named_by_its_path():
    """Before any process is started."""

    class Holder(dl.Callback):
        def __init__(self):
            super().__init__()
            self.tools = {"lock": threading.Lock()}

    with pytest.raises(TypeError, match=r"^runner._given_callbacks\['holder'\]\.tools\['lock'\] is a lock"):
        train(callbacks={"holder": Holder()})


def test_a_port_that_is_taken_is_named():
    """Before any process is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            train(ddp=False, cpu=False, engine=dl.DistributedDataParallelEngine(2, address="127.0.0.1", port=port))


def test_address_and_port_of_the_users_own_work():
    """Spawned processes meet where the user says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    engine = dl.DistributedDataParallelEngine(2, address="127.0.0.1", port=port, device="cpu")
    runner = train(ddp=False, cpu=False, engine=engine)

    assert runner.batch_step == 4
