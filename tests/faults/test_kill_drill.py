"""A run that is killed repeatedly ends with the same results; `make drills` is the long version."""

from functools import partial

import pytest
import torch

from runnerkit.checkpoints.file import load_checkpoint, save_checkpoint
from tests.faults import drill as drills
from tests.faults import launched_drill, proxy, store_drill
from tests.faults.drill import PLACES, TIME, Kill, Tally, attempt, drill, table
from tests.faults.fingerprint import differences, fingerprint, leaves
from tests.faults.job import FINITE, MESH
from tests.storage.s3_server import Bucket


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "num_kills", "source"), [(1, 5, None), (2, 2, None), (2, 2, FINITE), (4, 1, MESH)]
)
def test_a_killed_run_equals_the_run_that_was_not(tmp_path, num_processes, num_kills, source):
    """The last checkpoint is equal bit for bit, and so are CSV and JSONL files and TensorBoard's series."""
    tally = drill(num_kills, num_processes, folder=tmp_path, seed=num_processes, source=source)

    assert tally.different == [] and tally.kills.total() >= num_kills


@pytest.mark.slow
def test_a_killed_run_whose_logdir_is_a_file_url_equals_the_run_that_was_not(tmp_path):
    """It is the same as the path."""
    tally = drill(2, 1, folder=tmp_path, seed=3, is_file_url=True)

    assert tally.different == [] and tally.kills.total() >= 2


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
    lines = run / "metrics.jsonl"
    lines.write_text(lines.read_text().replace("0.", "1.", 1))
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
        f"csv {csv.name}", "JSONL", "/model_state_dict/0.bias", "/optimizer_state_dict/param_groups/0/lr",
        "/scheduler_state_dict/last_epoch", "/callbacks/stop/num_bad_epochs", "/rng/0/torch",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_processes", "num_kills", "source"), [(1, 2, None), (2, 2, None), (4, 1, MESH)])
def test_a_run_in_a_store_equals_the_run_on_a_disk_after_kills_and_faults(
    tmp_path, s3_server, num_processes, num_kills, source
):
    """It needs no disk that survives, leaves nothing that it does not need, and touches nothing of others."""
    with proxy.running(s3_server) as faults:
        tally = store_drill.drill(
            num_kills,
            2 * num_kills,
            num_processes,
            folder=tmp_path,
            server=s3_server,
            faults=faults,
            seed=1,
            source=source,
        )

    assert tally.different == [] and tally.others == []
    assert tally.kills.total() >= num_kills and tally.faults.total() >= 2 * num_kills


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_while_it_changes_a_store_leaves_nothing(tmp_path, s3_server):
    """The next run, on another machine, deletes what no manifest names; and so does one after that."""
    places = (
        "after an object is uploaded", "after a log is uploaded", "before the manifest is written",
        "after the manifest is written", "before an old object is deleted", "after the manifest is read",
    )  # fmt: skip
    bucket = Bucket.create("kills", s3_server)
    target = store_drill.Target(bucket.url(), tmp_path, s3_server)
    neighborhood = store_drill.Neighborhood(bucket, "run")
    tally = Tally(1)

    for number, place in enumerate(places):
        kill = Kill(place, 0, num_calls=1 if "manifest" in place else 2, places=store_drill.STORE_PLACES)
        run = partial(target.run, 1, tmp_path / f"disk-{number}")
        assert not attempt(tmp_path / "run", 1, kill, tally, run=run), place
    assert attempt(tmp_path / "run", 1, None, tally, run=partial(target.run, 1, tmp_path / "disk"))

    assert tally.kills == dict.fromkeys(places, 1)
    assert list(neighborhood.faults()) == []


def test_objects_of_others_are_watched(s3):
    """A change, a deletion and an object that is left are found."""
    neighborhood = store_drill.Neighborhood(s3, "run")
    s3.put("run/manifest.json", b'{"logs": ["csv/train.csv"], "checkpoints": {}}')
    s3.put("run/csv/train.csv", b"")
    assert list(neighborhood.faults()) == []

    s3.put("run/notes.txt", b"changed")
    s3.delete("run-2/manifest.json")
    s3.put("run/checkpoints/objects/left", b"")
    s3.delete("run/csv/train.csv")

    assert sorted(neighborhood.faults()) == [
        "run-2/manifest.json of another was deleted",
        "run/checkpoints/objects/left is left",
        "run/csv/train.csv is named by the manifest and missing",
        "run/notes.txt of another was changed",
    ]


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
