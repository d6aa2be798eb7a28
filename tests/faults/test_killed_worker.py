"""A data worker that is killed under a launcher: every rank ends with that as the cause."""

import os
import signal

import pytest
from torch.utils.data import Dataset

from tests.faults.test_stuck import launched
from tests.tiny import classification

pytestmark = pytest.mark.slow


class Kills(Dataset):
    """A data set whose sample 20 kills the worker that reads it in one rank, or whose worker's id is in a file."""

    def __init__(self, rank, folder=None):
        self.data, self.rank, self.folder = classification(64), rank, folder

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.folder is not None:
            (self.folder / os.environ["RANK"]).write_text(str(os.getpid()))
        elif index >= 20 and int(os.environ["RANK"]) == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.data[index]


KILLED_FROM_OUTSIDE = """
import signal, time
from pathlib import Path
from tests.faults.test_killed_worker import Kills

folder = Path(__file__).parent

class KillsAnothers(dl.Callback):
    def on_batch_start(self, runner):
        if runner.engine.rank == 1 and runner.batch_step == 3:
            time.sleep(1)
            os.kill(int((folder / "0").read_text()), signal.SIGKILL)
            time.sleep(1)

fit(KillsAnothers(), data=Kills(0, folder))
"""


@pytest.mark.parametrize(
    "script",
    [
        *(f"from tests.faults.test_killed_worker import Kills; fit(data=Kills({rank}))" for rank in (0, 1)),
        KILLED_FROM_OUTSIDE,
    ],
    ids=["rank 0", "rank 1", "while rank 0 waits for rank 1"],
)
def test_a_data_worker_that_is_killed_is_the_cause_on_both_ranks(tmp_path, script):
    """Torch raises whenever one of its workers ends, also while rank zero waits for others to read the cause, and
    during the reduction of gradients, where it waits in C++."""
    for errors, code in launched(tmp_path, script):
        assert code == 1
        assert "DataLoader worker (pid" in errors
        assert "without an error report" not in errors


INTERRUPTED = """
import signal, threading
from runnerkit.engines.launch import several_processes

def raise_again(number, frame):
    raise RuntimeError("a worker of a loader has ended")

def interrupted(error, **place):
    is_over = threading.Event()

    def send():
        while not is_over.wait(0.02):
            os.kill(os.getpid(), signal.SIGCHLD)

    signal.signal(signal.SIGCHLD, raise_again)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        return root_cause(error, **place)
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        is_over.set()
        sender.join()

if os.environ["RANK"] == "0":
    root_cause, several_processes.root_cause = several_processes.root_cause, interrupted

class Fails(dl.Callback):
    def on_batch_end(self, runner):
        if runner.engine.rank == 0:
            raise LookupError("the real error")

fit(Fails(), timeout_s=30)
"""


def test_sigchld_does_not_cut_short_what_rank_zero_tells(tmp_path):
    """Torch's handler raises in the main thread; rank zero, which holds the store, would otherwise exit too early."""
    for errors, code in launched(tmp_path, INTERRUPTED):
        assert code == 1
        assert "LookupError: the real error" in errors
        assert "a worker of a loader has ended" not in errors
        assert "without an error report" not in errors
