"""A run that is killed repeatedly ends with the same results; `make drills` is the long version."""

import functools
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from runnerkit.checkpoints.file import load_checkpoint, save_checkpoint
from tests.faults import drill as drills
from tests.faults import launched_drill, proxy, store_drill
from tests.faults.drill import PLACES, TIME, Kill, Tally, attempt, drill, table, whole_run
from tests.faults.fingerprint import differences, fingerprint, leaves
from tests.faults.job import FINITE, MESH, STREAMS
from tests.storage.s3_server import Bucket


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of all runs that are not killed."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def expected(folder):
    """Return a function that trains each run that is not killed once, and returns its fingerprint."""
    return functools.cache(partial(whole_run, folder))


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "num_kills", "source"), [(1, 3, None), (2, 2, None), (2, 1, FINITE)])
def test_a_killed_run_equals_the_run_that_was_not(tmp_path, expected, num_processes, num_kills, source):
    """The last checkpoint is equal bit for bit, and so are CSV and JSONL files and TensorBoard's series. Some logdirs
    are file URLs, one with encoded spaces and commas, which are the same as the paths."""
    tally = drill(
        num_kills, num_processes, folder=tmp_path, seed=num_processes, source=source,
        is_file_url=(num_processes, source) != (2, None), expected=expected(num_processes, source),
    )  # fmt: skip

    assert tally.different == [] and tally.kills.total() >= num_kills


@pytest.mark.slow
def test_the_drill_sees_what_differs(tmp_path, expected, folder):
    """One number in a row, one bit of a weight, a learning rate, a stopping count or a random state is enough."""
    before = expected(1, None)
    run = shutil.copytree(folder / "whole-1-None", tmp_path / "run")

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

    found = {key.replace("//", "/") for key in differences(before, fingerprint(run))}
    assert found == {
        f"csv {csv.name}", "JSONL", "/model_state_dict/0.bias", "/optimizer_state_dict/param_groups/0/lr",
        "/scheduler_state_dict/last_epoch", "/callbacks/stop/num_bad_epochs", "/rng/0/torch",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_processes", "source"), [(2, None), (4, MESH)])
def test_a_run_in_a_store_equals_the_run_on_a_disk_after_kills_and_faults(
    tmp_path, s3_server, expected, num_processes, source
):
    """It needs no disk that survives, leaves nothing that it does not need, and touches nothing of others."""
    with proxy.running(s3_server) as faults:
        tally = store_drill.drill(
            1, 2, num_processes, folder=tmp_path, server=s3_server, faults=faults, seed=1, source=source,
            expected=expected(num_processes, source),
        )  # fmt: skip

    assert tally.different == [] and tally.others == []
    assert tally.kills.total() >= 1 and tally.faults.total() >= 2
    row = store_drill.table_of_stored_streams([tally]).splitlines()[-1]
    assert row.endswith(f"| {tally.num_runs} | {tally.num_runs} | {tally.faults.total()} | 0 |")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_while_it_changes_a_store_leaves_nothing(tmp_path, s3_server, expected):
    """The next run, on another machine, deletes what no manifest names, and so does one after that; in the end, the run
    equals the one on a disk."""
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
    assert list(neighborhood.faults()) == [] == differences(expected(1, None), target.fingerprint())


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
        "run-2/manifest.json of another was deleted", "run/checkpoints/objects/left is left",
        "run/csv/train.csv is named by the manifest and missing", "run/notes.txt of another was changed",
    ]  # fmt: skip


def test_what_only_one_run_has_differs_too():
    """A NaN at the same place in both counts as equal."""
    one = dict(leaves({"metrics": {"loss": float("nan")}, "scaler": torch.zeros(2)}))
    other = dict(leaves({"metrics": {"loss": float("nan")}, "callbacks": [1]}))

    assert differences(one, dict(one)) == [] and differences(one, other) == ["/callbacks/0", "/scaler"]


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
    assert (rows[-2][1].strip(), rows[-1][1].strip()) == ("2", "-")  # with one process, no others have to end


def heads(table):
    """Return the heads of the rows of a Markdown table, or, of one with a row for each source, those of its columns."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return lines[0] if "source" in lines[0][0] else [line[0] for line in lines]


def test_the_page_has_the_tables_of_make_drills():
    """Each drill has a section, and its rows or columns are those that the command writes."""
    page = Path(__file__).parents[2].joinpath("docs/reliability.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"<!-- ([a-z ]+): written by make drills -->\n(.*?)<!-- end", page, flags=re.DOTALL))
    one, two = store_drill.StoreTally(1), store_drill.StoreTally(2)
    tables = {
        "drills": drills.table([one, two]),
        "stream drills": drills.table_of_streams([one]),
        "mesh drills": drills.table([Tally(4)]),
        "store drills": store_drill.table([one, two]),
        "stream store drills": store_drill.table_of_stored_streams([one]),
        "launched drills": launched_drill.table({"torchrun": two}, is_in_store=False),
        "launched store drills": launched_drill.table({"torchrun": two}, is_in_store=True),
    }

    assert found.keys() == tables.keys()
    for name, text in found.items():
        if not text.startswith("Not run yet"):
            assert heads(text) == heads(tables[name]), name
            assert ("s3fs" in text.partition("\n")[0]) == ("store" in name), f"{name}: the versions of the run"
    assert set(re.findall(r"^\| ([^|]+) \| \d", found["stream drills"], flags=re.MULTILINE)) == STREAMS.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("launcher", "is_in_store"), [("torchrun", False), ("plain python", True)])
def test_a_run_whose_launcher_was_killed_equals_the_run_that_was_not(
    tmp_path, s3_server, expected, launcher, is_in_store
):
    """One kill of what `make drills` does under each launcher: every process ends, and the resumed run is complete, in
    a store on a machine with an empty disk."""
    killed, tally = tmp_path / "killed", Tally(2)
    target = store_drill.Target(Bucket.create("launched", s3_server).url(), killed, s3_server) if is_in_store else None
    killed.mkdir()
    attempt = partial(launched_drill.attempt, launcher, killed, tally=tally, target=target)

    assert not attempt("the parent", 0.5, staging=tmp_path / "disk-1")
    assert tally.kills == {"the parent": 1}
    assert attempt(None, 0.0, staging=tmp_path / "disk-2")
    found = fingerprint(killed) if target is None else target.fingerprint()
    assert differences(expected(2, None), found) == []
