"""A signal to any process saves and ends the run after a step; it then resumes as if never interrupted."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from runnerkit import dl
from runnerkit.checkpoints.fault import fault_of
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.loop.stop_signals import Interrupted, Preempted, StopRequests
from tests.faults.kills import Send
from tests.storage.stored_runs import At
from tests.test_resume import Augmented, read_csv
from tests.tiny import loader, mlp, train, weights


class OwnLoader:
    """An iterable of batches without a position that can be restored."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def own_loader():
    return OwnLoader(list(loader(40, 4)))


def loader_with_its_own_distributed_sampler():
    data = Augmented(40)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0))


class WithoutSampler(DataLoader):
    """A user's loader that makes its batches itself, so its position is unknown; only iterating shows this."""

    def __iter__(self):
        return iter(list(loader(40, 4)))


def loader_that_ignores_its_sampler():
    return WithoutSampler(Augmented(40), batch_size=4)


def fit(logdir, *callbacks, **options):
    """Train four epochs, of ten steps in one process or five in two, with all kinds of state to restore."""
    model = mlp(dropout=0.3, batch_norm=True)
    loaders = {"train": DataLoader(Augmented(40), batch_size=4, shuffle=True), "valid": loader(21, 4)}
    options = {"optimizer": torch.optim.Adam(model.parameters(), lr=0.01), "loaders": loaders, **options}
    train(model, callbacks=callbacks, num_epochs=4, logdir=logdir, **{"resume": "auto", **options})
    return weights(model)


def last(logdir):
    return CheckpointFolder(logdir / "checkpoints").records[-1]


def assert_goes_on(broken, whole, **options):
    """Check that the resumed run ends with the weights and the logs of the run that was never stopped."""
    assert torch.equal(fit(broken, **options), whole.result)
    for key in ("train", "valid"):
        assert read_csv(broken, key) == read_csv(whole.folder, key)


class Whole:
    def __init__(self, folder, **options):
        self.folder = folder
        self.result = fit(folder, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_and_stops_after_the_step(tmp_path, whole, number):
    """This holds even if only epochs are saved; handlers are restored; exit code 75, or 130 for Ctrl-C."""
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]

    with pytest.raises(Interrupted if number == signal.SIGINT else Preempted) as stopped:
        fit(tmp_path, Send(number, step=17))

    assert stopped.value.code == (130 if number == signal.SIGINT else 75)
    assert isinstance(stopped.value, KeyboardInterrupt) is (number == signal.SIGINT)
    assert (last(tmp_path).epoch, last(tmp_path).batch) == (2, 17)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
    assert_goes_on(tmp_path, whole)


def test_the_first_signal_is_answered_at_once(tmp_path, caplog):
    """Otherwise a user who presses Ctrl-C in a long evaluation would not know that it was received."""

    class Listen(dl.Callback):
        def on_batch_end(self, runner):
            deadline = time.monotonic() + 10
            while runner.batch_step == 17 and not caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)

    with pytest.raises(Interrupted):
        fit(tmp_path, Send(signal.SIGINT, step=17), Listen(order=dl.CallbackOrder.External + 1))

    assert "SIGINT: the run stops after the current step or evaluation" in caplog.messages[0]


def test_a_signal_in_the_evaluation_stops_after_the_epoch(tmp_path, whole):
    """The checkpoint is that of the epoch's end."""
    with pytest.raises(Preempted):
        fit(tmp_path, Send(signal.SIGTERM, step=20, loader_key="valid"))

    assert (last(tmp_path).name, last(tmp_path).batch) == ("model.0002.pth", 20)
    assert_goes_on(tmp_path, whole)


def test_a_signal_in_the_last_evaluation_does_not_end_a_finished_run(tmp_path):
    """There is nothing left to stop."""
    fit(tmp_path, Send(signal.SIGTERM, step=40, loader_key="valid"))

    assert last(tmp_path).batch == 40


class TwoStages(dl.SupervisedRunner):
    stages = ("train_first", "train_second")


def test_a_signal_in_the_last_evaluation_of_a_stage_stops_before_the_next_stage(tmp_path):
    """The checkpoint is that of the stage's end, and the resumed run starts with the next stage."""
    whole = Whole(tmp_path / "whole", runner=TwoStages())

    with pytest.raises(Preempted) as stopped:
        fit(tmp_path / "broken", Send(signal.SIGTERM, step=40, loader_key="valid"), runner=TwoStages())

    assert stopped.value.code == 75
    newest = last(tmp_path / "broken")
    assert (newest.name, newest.stage, newest.batch) == ("model.0004.pth", "train_first", 40)
    assert_goes_on(tmp_path / "broken", whole, runner=TwoStages())


@contextmanager
def during_the_next_save(send):
    """Call `send` when a file is about to be written."""
    add = CheckpointFolder.add

    def interrupted(folder, *args, **what):
        CheckpointFolder.add = add
        send()
        return add(folder, *args, **what)

    CheckpointFolder.add = interrupted
    try:
        yield
    finally:
        CheckpointFolder.add = add


def test_a_signal_during_a_save_stops_after_the_step_that_follows(tmp_path, whole):
    """The file being written is completed."""
    with during_the_next_save(lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(Preempted):
        fit(tmp_path)

    names = [record.name for record in CheckpointFolder(tmp_path / "checkpoints").records]
    assert names == ["model.0001.pth", "model.0002.00000011.pth"]
    assert_goes_on(tmp_path, whole)


def test_a_signal_during_an_asynchronous_save_stops_soon(tmp_path, whole):
    """Before the run ends, the thread's file is complete, and so is the one that the stop requests."""
    steps_that_end, step, sent_at = threading.Event(), 0, 0

    def send():
        nonlocal sent_at
        sent_at = step  # a busy machine may start the thread some steps late
        os.kill(os.getpid(), signal.SIGTERM)
        assert steps_that_end.wait(60)  # training continues meanwhile

    class Tell(dl.Callback):
        def on_batch_end(self, runner):
            nonlocal step
            step = runner.batch_step
            if step > 10:
                steps_that_end.set()

    checkpoint = dl.CheckpointCallback(tmp_path, content="runner", asynchronous=True)
    with during_the_next_save(send), pytest.raises(Preempted):
        fit(tmp_path, checkpoint, Tell())

    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert (folder.records[0].epoch, folder.records[0].batch) == (1, 10)
    assert 10 < last(tmp_path).batch <= max(10, sent_at) + 2
    assert [fault_of(folder.folder / record.name, record) for record in folder.records] == [None, None]
    assert_goes_on(tmp_path, whole)


def test_a_callback_that_was_stopped_can_be_used_again(tmp_path):
    """The stop request applies only to the run that it ended."""
    checkpoint = dl.CheckpointCallback(tmp_path, content="runner")
    with pytest.raises(Preempted):
        fit(tmp_path, checkpoint, Send(signal.SIGTERM, step=17))

    fit(tmp_path, checkpoint)

    assert (last(tmp_path).epoch, last(tmp_path).batch) == (4, 40)


def test_a_second_signal_stops_at_once(tmp_path):
    """It stops in the middle of the step without saving, as Ctrl-C does without a runner."""
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(tmp_path, Send(signal.SIGINT, step=17, times=2))

    assert not isinstance(stopped.value, Interrupted)
    assert last(tmp_path).batch == 10


def test_a_second_sigterm_at_once_is_the_same_wish(tmp_path, whole):
    """Slurm sends two: one to a batch job's shell and one to its steps."""
    with pytest.raises(Preempted):
        fit(tmp_path, Send(signal.SIGTERM, step=17, times=2))

    assert last(tmp_path).batch == 17
    assert_goes_on(tmp_path, whole)


def test_gradients_that_wait_for_their_step_are_not_lost(tmp_path):
    """The signal arrives in the second of three accumulated batches."""
    with pytest.raises(Preempted):
        fit(tmp_path, Send(signal.SIGTERM, step=5), dl.OptimizerCallback(accumulation_steps=3))

    assert last(tmp_path).batch == 6


@pytest.mark.parametrize(
    "make_loader", [own_loader, loader_with_its_own_distributed_sampler, loader_that_ignores_its_sampler]
)
def test_without_a_position_to_save_a_signal_falls_back_to_the_last_epoch(tmp_path, caplog, make_loader):
    """The exit code is still 75, so that Slurm requeues; the run resumes at the interrupted epoch's start."""
    loaders = {"train": make_loader(), "valid": loader(21, 4)}
    whole = Whole(tmp_path / "whole", loaders=loaders)
    for step, known in ((5, []), (17, ["model.0001.pth"])):
        with pytest.raises(Preempted) as stopped:
            fit(tmp_path / "broken", Send(signal.SIGTERM, step=step), loaders=loaders)

        assert stopped.value.code == 75
        assert [each.name for each in CheckpointFolder(tmp_path / "broken" / "checkpoints").records] == known
        assert "the position of loader 'train' within an epoch cannot be saved" in caplog.text
    assert_goes_on(tmp_path / "broken", whole, loaders=loaders)


@pytest.mark.parametrize(
    ("make_loader", "num_processes", "words"),
    [
        (own_loader, 1, "loader 'train' cannot save its position .*; leave out every_steps"),
        (
            loader_with_its_own_distributed_sampler,
            1,
            "loader 'train' cannot save its position .*; leave out every_steps",
        ),
        (
            loader_that_ignores_its_sampler,
            1,
            "position .* the __iter__ of WithoutSampler does not use its batch_sampler",
        ),
        (loader_that_ignores_its_sampler, 2, "WithoutSampler does not use its batch_sampler, which holds the samples"),
    ],
)
def test_saving_every_so_many_steps_without_a_position_is_refused(tmp_path, make_loader, num_processes, words):
    """Before the first batch is read, unless only the batch shows it; of several processes, each would train on all."""
    steps = []
    every_steps = 3 if num_processes == 1 else None
    checkpoint = dl.CheckpointCallback(tmp_path, content="runner", every_steps=every_steps)
    loaders = {"train": make_loader(), "valid": loader(21, 4)}

    with pytest.raises(TypeError, match=words):
        fit(tmp_path, checkpoint, At(lambda: steps.append(1)), loaders=loaders, num_processes=num_processes)

    assert steps == [] or make_loader is loader_that_ignores_its_sampler


def test_the_users_own_handler_stays(tmp_path):
    """A signal that the user handles is left to that handler."""
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        fit(tmp_path, Send(signal.SIGUSR1, step=7))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1] and last(tmp_path).batch == 40


def test_a_signal_that_comes_with_the_end_of_the_time_keeps_its_exit_code(tmp_path):
    """Ctrl-C during the last step before `max_hours` is still Ctrl-C."""
    with pytest.raises(Interrupted):
        fit(tmp_path, Send(signal.SIGINT, step=1), dl.CheckpointCallback(tmp_path, content="runner", max_hours=1e-9))


def test_weights_alone_are_no_reason_to_wait(tmp_path):
    """Without a checkpoint that a run could resume from, Ctrl-C acts at once."""
    checkpoint = dl.CheckpointCallback(tmp_path / "weights", content="model")
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(None, Send(signal.SIGINT, step=7), checkpoint, resume=None)
    assert not isinstance(stopped.value, Interrupted)


class Clock:
    """A clock advanced by an engine's gather, which all ranks share."""

    num_processes = 2

    def __init__(self, monkeypatch, now):
        self.now, self.gathered = now, []
        monkeypatch.setattr("runnerkit.loop.stop_signals.time.monotonic", lambda: self.now)

    def gather_object(self, value):
        self.gathered.append(self.now)
        return [value, (None, 0.0)]


@pytest.mark.parametrize(("seconds_per_step", "most"), [(0.001, 40), (0.1, 40), (3.0, 11)])
@pytest.mark.parametrize(("step", "started_at"), [(0, 0.0), (200_000, 120.0), (50, 1e6)])
def test_processes_tell_each_other_about_once_a_second(monkeypatch, seconds_per_step, most, step, started_at):
    """The interval does not depend on how fast the steps are, on a resumed step, or on the machine's clock."""
    engine, stop = Clock(monkeypatch, started_at), StopRequests()
    while engine.now < started_at + 30:
        step, engine.now = step + 1, engine.now + seconds_per_step
        assert stop.due(step, engine) is None
    assert 10 <= len(engine.gathered) <= most
    assert all(later - earlier <= max(2.5, 2 * seconds_per_step) for earlier, later in pairwise(engine.gathered))

    stop.ask(signal.SIGTERM)
    asked_at = engine.now
    while stop.due(step := step + 1, engine) is None:
        engine.now += seconds_per_step
    assert engine.now - asked_at <= max(2.5, 2 * seconds_per_step)


# Several processes.

TO_PARENT = """
import os, sys, time
from pathlib import Path
from runnerkit import dl
from tests.faults.test_preemption import fit

class ToParent(dl.Callback):
    def on_batch_end(self, runner):
        if runner.batch_step == 7 and runner.engine.rank == 0:
            os.kill(os.getppid(), int(sys.argv[2]))
        if runner.batch_step >= 7:
            time.sleep(0.1)  # the run shall not end before the calling process wakes up

fit(Path(sys.argv[1]), ToParent(dl.CallbackOrder.External), num_processes=2)
"""

RESTARTED = """
import signal, sys
from pathlib import Path
from tests.faults.kills import Send
from tests.faults.test_preemption import fit

result = fit(Path(sys.argv[1]), Send(signal.SIGTERM, step=7, rank=1), num_processes=2)
Path(sys.argv[1], "result").write_text(str(result.sum().item()))
"""

IMPATIENT = """
import signal, sys
from pathlib import Path
from tests.faults.kills import Send
from tests.faults.test_preemption import fit

fit(Path(sys.argv[1]), Send(signal.SIGTERM, step=17, times=2, pause_s=1.3))
"""

# Each run is stopped, and resumes in the same two processes.
IN_TURNS = """
import json, os, signal, sys
from contextlib import nullcontext
from pathlib import Path
from runnerkit.loop.stop_signals import Preempted
from tests.faults.kills import Send
from tests.faults.test_preemption import during_the_next_save, fit, last

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
(folder / f"pid {rank}").write_text(str(os.getpid()))

def send_to(rank):
    return lambda: os.kill(int((folder / f"pid {rank}").read_text()), signal.SIGTERM)

found = {}
for name, callbacks, saving in [
    *((f"rank {rank}", [Send(signal.SIGTERM, step=7, rank=rank)], nullcontext()) for rank in (0, 1, -1)),
    ("rank 0 while it saves", [], during_the_next_save(send_to(0))),
    ("rank 1 while rank 0 saves", [], during_the_next_save(send_to(1))),
]:
    code = batch = 0
    try:
        with saving:
            fit(folder / name, *callbacks, num_processes=2)
    except Preempted as stopped:
        code, batch = stopped.code, last(folder / name).batch
    found[name] = code, batch, fit(folder / name, num_processes=2).sum().item()
(folder / f"found.{rank}.json").write_text(json.dumps(found))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def start(folder, text, *arguments, launcher=()):
    """Run a script with a logdir and arguments."""
    (folder / "script.py").write_text(text)
    (folder / "log").mkdir()
    return subprocess.run(
        [sys.executable, *launcher, str(folder / "script.py"), str(folder / "log"), *arguments], check=False,
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("whole"), num_processes=2)


@pytest.mark.slow
def test_a_second_sigterm_later_ends_at_once(tmp_path, whole):
    """After more than a second, in a step that does not end, it acts as without a runner, and nothing is saved."""
    done = start(tmp_path, IMPATIENT)

    assert done.returncode == -signal.SIGTERM, done.stderr
    assert last(tmp_path / "log").batch == 10
    assert_goes_on(tmp_path / "log", whole)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_the_calling_process_passes_a_signal_on_and_ends_as_its_processes(tmp_path, number, code):
    """A signal to a rank is tested below."""
    done = start(tmp_path, TO_PARENT, str(int(number)))

    assert done.returncode == code, done.stderr
    assert 7 <= last(tmp_path / "log").batch <= 20
    assert f"{number.name}: saved a checkpoint and stopped after step" in done.stderr
    assert f"{number.name}: the run stops after" in done.stderr


@pytest.mark.slow
def test_torchrun_starts_again_what_was_stopped(tmp_path, whole_of_two):
    """With ``--max-restarts`` and ``resume="auto"``, the run resumes automatically."""
    done = start(tmp_path, RESTARTED, launcher=(*TORCHRUN, "--max-restarts=1"))

    assert done.returncode == 0, done.stderr
    assert float((tmp_path / "log" / "result").read_text()) == whole_of_two.result.sum().item()
    assert read_csv(tmp_path / "log", "train") == read_csv(whole_of_two.folder, "train")


@pytest.mark.slow
def test_a_signal_to_any_rank_during_a_save_or_not_stops_both(tmp_path, whole_of_two):
    """Both stop after the same step with a checkpoint, and resume to the weights and logs of the run never stopped."""
    done = start(tmp_path, IN_TURNS, launcher=TORCHRUN)

    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / "log" / f"found.{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert len(found[0]) == 5
    for name, (code, batch, result) in found[0].items():
        assert (code, result) == (75, whole_of_two.result.sum().item()), name
        assert 5 < batch <= 20, name
        for key in ("train", "valid"):
            assert read_csv(tmp_path / "log" / name, key) == read_csv(whole_of_two.folder, key)
