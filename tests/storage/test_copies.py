"""Tests of reads from stores: which objects a URL stands for, and what its local copy contains."""

import hashlib
from pathlib import Path

import pytest
import torch

from runnerkit import dl, read_metrics
from runnerkit.checkpoints.weights import export_safetensors, find_weights, read_weights
from runnerkit.storage.remote.copies import copy_into, is_whole, local_copy, logdir_of
from runnerkit.storage.remote.manifest import Entry, Manifest
from runnerkit.storage.remote.store import Store
from runnerkit.storage.remote.urls import as_url
from tests.storage.stored_runs import saving, train
from tests.tiny import mlp, weights


def stored(url, **options):
    """Train a run in a store; return its URL."""
    train(url, saving(url), **{"num_epochs": 1, **options})
    return url


@pytest.mark.parametrize(
    "url", ["memory://b/checkpoints-v2/run", "memory://b/checkpoints", "memory://checkpoints/checkpoints/run"]
)
def test_a_url_may_contain_the_name_of_the_folder_of_checkpoints(url):
    """Only the folder of checkpoints of a run has a meaning, not other folders or buckets with such a name."""
    stored(url)
    last = f"{url}/checkpoints/last.pth"

    loaded = [dl.SupervisedRunner(mlp(seed=2, dropout=0.3)).load(each, which="last").model for each in (url, last)]

    assert torch.equal(*map(weights, loaded))
    assert [as_url(logdir_of(Path(each))) for each in (url, last, f"{url}/checkpoints")] == [url] * 3
    assert is_whole(local_copy(last), last) and train("memory://next/run", resume=last, num_epochs=2).epoch_step == 2


def test_the_logdir_of_a_run_that_was_copied_to_a_store_is_found():
    """It does not have a manifest."""
    Store("memory://b/run").write("checkpoints/best.pth", b"weights")

    assert as_url(logdir_of(Path("memory://b/run/checkpoints/best.pth"))) == "memory://b/run"
    assert as_url(logdir_of(Path("memory://b/checkpoints/a"))) == "memory://b/checkpoints/a"


def test_other_files_in_the_folder_of_checkpoints_are_read():
    """Weights that were exported there are not in the manifest."""
    url = stored("memory://runs/mine")
    out = export_safetensors(url, f"{url}/checkpoints/exported.safetensors")

    loaded = [dl.SupervisedRunner(mlp(seed=2, dropout=0.3)).load(each).model for each in (url, out)]

    assert torch.equal(*map(weights, loaded))


def test_a_second_copy_is_that_of_the_run_which_replaced_the_first():
    """Otherwise readers would mix the files of two runs."""
    url = stored("memory://runs/mine", num_epochs=2)
    copy = local_copy(url)
    below = local_copy("memory://runs")
    assert {2, 1} == set(read_metrics(url)["epoch"]) and (copy / "checkpoints/model.0002.pth").exists()

    for name in Store(url).names():
        Store(url).delete(name)
    Store("memory://runs").write("a.txt", b"mine")
    train(url, num_epochs=1)

    assert set(read_metrics(url)["epoch"]) == {1} and (copy / "checkpoints/model.0002.pth").exists()
    assert local_copy(url) == copy and local_copy("memory://runs") == below
    assert (copy / "csv/train.csv").exists() and (below / "a.txt").exists()
    assert not any((each / "checkpoints/model.0002.pth").exists() for each in (copy, below / "mine"))


def test_readers_continue_without_a_log_that_somebody_deleted(caplog):
    """As a run does: the checkpoints and the other logs are intact."""
    url = stored("memory://runs/mine")
    Store(url).delete("csv/train.csv")

    loaded = dl.SupervisedRunner(mlp(seed=2, dropout=0.3)).load(url)

    assert loaded.model is not None and not (local_copy(url) / "csv/train.csv").exists()
    assert "memory://runs/mine/csv/train.csv is missing; continuing without it" in caplog.text
    assert (local_copy(url) / "csv/valid.csv").exists() and set(read_metrics(url)["loader"]) == {"valid"}


@pytest.mark.parametrize("below", ["", "/checkpoints"])
def test_reading_weights_copies_one_checkpoint(below):
    """Runs keep many, and have large logs."""
    url = stored("memory://runs/mine", num_epochs=2)

    path = find_weights(f"{url}{below}", which="last")

    assert sorted(each.name for each in path.parent.iterdir()) == ["index.json", "last.pth"]
    expected = read_weights(local_copy(f"{url}/checkpoints/last.pth"))
    assert torch.equal(expected["0.weight"], read_weights(path)["0.weight"])


def test_reading_weights_of_a_folder_follows_its_link():
    """Sharded checkpoints are folders, and "best" is a link to one."""
    store, files = Store("memory://runs/mine"), {"index.json": b"[]", "model.0001/rest.pth": b"1", "model.0002/a": b"2"}
    entries = {}
    for name, content in files.items():
        entries[f"checkpoints/{name}"] = Entry.of(hashlib.sha256(content).hexdigest())
        store.write(entries[f"checkpoints/{name}"].object, content)
    links = {"checkpoints/best": "model.0001", "checkpoints/last": "model.0002"}
    store.write("manifest.json", Manifest(checkpoints=entries, links=links).to_json())

    copy = local_copy(store.url, which="best") / "checkpoints"

    assert sorted(each.relative_to(copy).as_posix() for each in copy.rglob("*")) == [
        "best", "index.json", "model.0001", "model.0001/rest.pth",
    ]  # fmt: skip
    assert (copy / "best/rest.pth").read_bytes() == b"1"


def test_a_run_reads_what_others_wrote_below_its_url():
    """Its own files are in its staging folder, but other runs and objects are in the store."""
    first = stored("memory://runs/mine/pretrain")
    url = "memory://runs/mine"
    init = export_safetensors(first, f"{url}/init.safetensors")

    resumed = train(url, saving(url, resume_model=init), num_epochs=2, resume=first)

    assert resumed.epoch_step == 2 and local_copy(f"{url}/checkpoints/model.0002.pth").exists()


def test_fetch_copies_other_files_of_a_logdir(tmp_path):
    """Plots, exported models and runs in the logdir; but not the objects in which stores keep checkpoints."""
    url = stored("memory://runs/mine")
    stored(f"{url}/inner")
    Store(url).write("metrics.png", b"plot")
    Store(url).write("checkpoints/weights.safetensors", b"weights")
    Store(url).write("lease.json", b"{}")

    copy_into(tmp_path / "run", url)
    copy_into(tmp_path / "runs", "memory://runs")

    for folder in (tmp_path / "run", tmp_path / "runs/mine"):
        assert (folder / "metrics.png").read_bytes() == b"plot"
        copied = ("checkpoints/weights.safetensors", "inner/checkpoints/last.pth")
        assert all((folder / name).exists() for name in copied)
        assert not any((folder / name).exists() for name in ("lease.json", "manifest.json", "checkpoints/objects"))
    assert not (local_copy(url) / "metrics.png").exists()


def test_a_copy_writes_nothing_outside_of_its_folder(tmp_path):
    """Names of objects may have any parts."""
    Store("memory://b/run").write("a.txt", b"mine")
    Store("memory://b/run").write("../../../b.txt", b"mine")

    copy_into(tmp_path / "new" / "run", "memory://b/run")

    assert [path.name for path in tmp_path.rglob("*.txt")] == ["a.txt"]


def test_an_object_with_several_names_is_copied_once():
    """The last checkpoint, which is the best one as well, has three names."""
    folder = local_copy(stored("memory://runs/mine")) / "checkpoints"

    assert (folder / "last.pth").samefile(folder / "model.0001.pth")
