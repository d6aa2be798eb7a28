"""A run that is killed repeatedly ends with the same results; `make drills` is the long version."""

import pytest
import torch

from runnerkit.checkpoints.file import load_checkpoint, save_checkpoint
from tests.faults import drill as drills
from tests.faults import launched_drill
from tests.faults.drill import PLACES, TIME, Kill, Tally, attempt, differences, drill, fingerprint, leaves, table
from tests.faults.job import FINITE


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "num_kills", "source"), [(1, 5, None), (2, 2, None), (2, 2, FINITE)])
def test_a_killed_run_equals_the_run_that_was_not(tmp_path, num_processes, num_kills, source):
    """The last checkpoint is equal bit for bit, and so are CSV files and TensorBoard's series."""
    tally = drill(num_kills, num_processes, folder=tmp_path, seed=num_processes, source=source)

    assert tally.different == [] and tally.kills.total() >= num_kills


@pytest.mark.slow
def test_the_drill_sees_what_differs(tmp_path):
    """One number in a row, one bit of a weight, a learning rate, a stopping count or a random state is enough."""
    run = tmp_path / "run"
    assert not attempt(run, 1, Kill("in the forward pass", 0, num_calls=70), tally := Tally(1))
    assert tally.kills == {"in the forward pass": 1}
    assert attempt(run, 1, None, tally)
    expected = fingerprint(run)

    csv = next(run.glob("csv/*.csv"))
    csv.write_text(csv.read_text().replace("0.", "1.", 1))
    last = run / "checkpoints" / "last.pth"
    state = load_checkpoint(last)
    state["model_state_dict"]["0.bias"][0].view(torch.int32).bitwise_xor_(1)
    next(iter(state["optimizer_state_dict"].values()))["param_groups"][0]["lr"] *= 2
    next(iter(state["scheduler_state_dict"].values()))["last_epoch"] += 1
    state["callbacks"]["stop"]["num_bad_epochs"] += 1
    state["rng"][0]["torch"][-1] += 1
    save_checkpoint(state, last)

    found = {key.replace("//", "/") for key in differences(expected, fingerprint(run))}
    assert found == {
        f"csv {csv.name}", "/model_state_dict/0.bias", "/optimizer_state_dict/param_groups/0/lr",
        "/scheduler_state_dict/last_epoch", "/callbacks/stop/num_bad_epochs", "/rng/0/torch",
    }  # fmt: skip


def test_what_only_one_run_has_differs_too():
    """A NaN at the same place in both counts as equal."""
    one = dict(leaves({"metrics": {"loss": float("nan")}, "scaler": torch.zeros(2)}))
    other = dict(leaves({"metrics": {"loss": float("nan")}, "callbacks": [1]}))

    assert differences(one, one) == [] == differences(one, dict(one))
    assert differences(one, other) == ["/callbacks/0", "/scaler"]


@pytest.mark.slow
def test_the_drill_sees_a_worker_that_is_left(tmp_path, monkeypatch):
    """Such a worker does not notice that its process is gone."""
    monkeypatch.setattr(drills, "WORKERS_LIMIT_S", 1.0)
    monkeypatch.setattr("torch.utils.data._utils.worker.ManagerWatchdog.is_alive", lambda self: True)

    with pytest.raises(AssertionError, match="1 of a loader's workers were still there 1 s after"):
        attempt(tmp_path / "run", 1, Kill("in the forward pass", 0, num_calls=20), Tally(1))


def test_the_table_counts_every_kill():
    """Each place has a row."""
    tally = Tally(1, num_runs=3, different=["broken-1-2: counters differs", "broken-1-2: csv differs"])
    tally.kills.update({place: number for number, place in enumerate([*PLACES, TIME])})

    rows = [line.strip("|").split("|") for line in table([tally]).splitlines()]

    assert [head.strip() for head, _ in rows[2:-4]] == [*PLACES, TIME]
    assert sum(int(number) for _, number in rows[2:-4]) == int(rows[-4][1])
    assert rows[-2][1].strip() == "2"
    assert rows[-1][1].strip() == "-"  # with one process there are no others


@pytest.mark.slow
def test_a_run_whose_launcher_was_killed_equals_the_run_that_was_not(tmp_path):
    """One kill of what `make drills` does under each launcher: every process ends, and the resumed run is complete."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert launched_drill.attempt("plain python", whole, None, 0.0, launched_drill.Tally())

    is_complete = launched_drill.attempt("torchrun", killed, "the parent", 0.5, tally := launched_drill.Tally())

    assert not is_complete and tally.kills == {"the parent": 1}
    assert launched_drill.attempt("torchrun", killed, None, 0.0, tally)
    assert differences(fingerprint(whole), fingerprint(killed)) == []
