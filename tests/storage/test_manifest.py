"""Tests of the manifest: what is read from a store may be damaged or malicious."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runnerkit.storage.remote.manifest import FORMAT_VERSION, OBJECTS, Entry, Manifest

URL = "s3://bucket/run"
SHA = "0123456789abcdef" * 4
NAME = st.text("ab1é _.-", min_size=1, max_size=9).filter(lambda name: set(name) != {"."})
FILE = st.lists(NAME, min_size=1, max_size=3).map("/".join)
ENTRY = st.builds(
    lambda sha256, shard_of: Entry.of(sha256, shard_of=shard_of),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
    st.none() | st.text("aZ1_.-", min_size=1, max_size=9),
)


def written(**changes):
    """Return the bytes of a valid manifest with other values in some fields."""
    content = json.loads(Manifest("run", {"checkpoints/last.pth": Entry.of(SHA)}, {}, ["csv/train.csv"]).to_json())
    return json.dumps(content | changes).encode()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)
@given(st.dictionaries(FILE, ENTRY, max_size=4), st.dictionaries(FILE, NAME, max_size=4), st.lists(FILE, max_size=4))
def test_a_manifest_is_read_as_it_was_written(checkpoints, links, logs):
    manifest = Manifest("a run", checkpoints, links, logs)

    assert Manifest.from_json(manifest.to_json(), URL) == manifest
    assert manifest.objects == {entry.object for entry in checkpoints.values()}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"null", b"3", b"\xff\xfe", b"<html>", written()[:-9], written(format_version="1"),
        written(format_version=None), written(checkpoints=[]), written(checkpoints={"a": "b"}), written(links=None),
        written(logs=3), written(logs=[3]), written(logs=[None]), written(checkpoints={"a": {"object": "x"}}),
        written(checkpoints={"a": {"object": 3, "sha256": 3}}), written(links={"a": 3}),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_refused(data):
    """The error names it."""
    with pytest.raises(ValueError, match=f"^{URL}/manifest.json is damaged"):
        Manifest.from_json(data, URL)


@pytest.mark.parametrize(
    "name",
    [
        "../x", "/etc/passwd", "C:\\x", "C:/x", "a/../../x", "a/..", "..", ".", "", "\\\\host\\x", "a\\..\\x", "file:x",
        "/", "//host/x",
    ],
)  # fmt: skip
def test_a_name_outside_of_the_logdir_is_refused(name, monkeypatch):
    """A manifest that somebody else wrote must not overwrite files anywhere; only on Windows are some names others."""
    if set(name) & set("\\:"):
        monkeypatch.setattr("runnerkit.storage.remote.manifest.os.name", "nt")
    for fields in (
        {"logs": [name]},
        {"checkpoints": {name: {"object": f"{OBJECTS}/{SHA}", "sha256": SHA}}},
        {"links": {name: "model.0001"}},
        {"links": {"checkpoints/last": name}},
    ):
        with pytest.raises(ValueError, match="is damaged"):
            Manifest.from_json(written(**fields), URL)


@pytest.mark.parametrize("target", ["a/b", "../model.0001", "..", "/model.0001"])
def test_a_link_leads_to_a_neighbor(target):
    with pytest.raises(ValueError, match="is damaged"):
        Manifest.from_json(written(links={"checkpoints/last": target}), URL)


@pytest.mark.parametrize(
    "name", ["csv/train.csv", "lease.json", f"{OBJECTS}/{SHA[:-1]}", f"{OBJECTS}/{SHA}-../../x", f"{OBJECTS}/../{SHA}"]
)
def test_an_object_of_a_checkpoint_is_named_after_its_content(name):
    """The run deletes objects that it no longer needs, and no others."""
    with pytest.raises(ValueError, match="not an object of a checkpoint"):
        Manifest.from_json(written(checkpoints={"checkpoints/a.pth": {"object": name, "sha256": SHA}}), URL)


@pytest.mark.parametrize("name", ["manifest.json", "lease.json", f"{OBJECTS}/{SHA}", "checkpoints/model.0001.pth"])
def test_a_log_is_not_a_file_of_the_store_itself(name):
    """A run deletes the objects of logs that it no longer has."""
    with pytest.raises(ValueError, match="is damaged"):
        Manifest.from_json(written(logs=[name]), URL)


def test_a_newer_manifest_is_refused():
    """The error says what to do."""
    with pytest.raises(ValueError, match="was written by a newer runnerkit: upgrade it"):
        Manifest.from_json(written(format_version=FORMAT_VERSION + 1, logs="another kind"), URL)
