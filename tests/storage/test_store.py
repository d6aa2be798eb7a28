"""Tests of reads and writes of objects while the network or the store fails."""

import hashlib
import threading
import time

import pytest

from runnerkit.storage.remote import store as module
from runnerkit.storage.remote.store import Damaged, Replaced, Store
from tests.faults import proxy
from tests.faults.proxy import Rule

URL = "faulty://runs/mine"
DATA = b"content" * 1000


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Repeat quickly."""
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.02)


class ServerError(Exception):
    """A class that the package does not know, as those of the protocols' packages."""


class NoAnswer(Exception):
    """An error with an attribute that botocore's have, None without an answer."""

    response = None


@pytest.mark.parametrize(
    "error",
    [TimeoutError("60 s"), OSError("500 Internal Error"), OSError("503 Slow Down"), ConnectionResetError("reset"),
     ServerError("unknown"), NoAnswer("closed"), OSError(5, "Input/output error")],
    ids=repr,
)  # fmt: skip
def test_an_error_of_the_network_or_the_store_is_repeated(faulty, tmp_path, caplog, error):
    """Each operation is repeated until it succeeds; one warning says so."""
    path = tmp_path / "file"
    path.write_bytes(DATA)

    def tried(operation, *args, **kwargs):
        faulty.fail_times(3, error)
        return operation(*args, **kwargs)

    store = Store(URL)
    tried(store.put, "a/b", path)
    tried(store.write, "c", b"new", replaces="new")
    assert tried(store.read, "a/b") == (DATA, "") and tried(store.read, "none") is None
    tried(store.get, "a/b", tmp_path / "copy")
    assert tried(store.exists, "a/b") and not tried(store.exists, "none")
    assert tried(store.names) == ["a/b", "c"]
    assert tried(store.mark_of, "a/b") == store.mark_of("a/b")
    tried(store.delete, "a/b")
    tried(store.delete, "a/b")

    assert (tmp_path / "copy").read_bytes() == DATA and store.names() == ["c"]
    warning = f"{URL}: could not write a/b, trying again: {type(error).__name__}: {error}"
    assert [each.getMessage() for each in caplog.records].count(warning) == 1
    assert f"{URL}: could not write c, trying again: {type(error).__name__}: {error}" in caplog.text


def test_the_repetition_ends(faulty, tmp_path, caplog, monkeypatch):
    """The error names the URL, the operation, the time and the last cause; nothing incomplete is left; warnings are
    rarer than attempts."""
    store = Store(URL, patience_s=3)
    store.write("a", DATA)
    monkeypatch.setattr(module, "_REPORT_EVERY_S", 1)
    faulty.fail_times(9999, TimeoutError("no answer"))
    began = time.monotonic()

    with pytest.raises(OSError, match=f"^{URL}: could not read a for \\d+ s: TimeoutError: no answer$"):
        store.get("a", tmp_path / "copy")

    assert time.monotonic() - began < 30 and not list(tmp_path.iterdir())
    assert store.last_error == "TimeoutError: no answer" and 2 <= len(caplog.records) <= 4 < len(faulty.calls)


def test_a_wrong_url_ends_sooner_than_a_store_that_has_worked(faulty, monkeypatch):
    """Until an operation has succeeded, the endpoint may be wrong; later the store is expected to come back."""
    monkeypatch.setattr(module, "FIRST_PATIENCE_S", 0.05)
    store = Store(URL, patience_s=30.0)
    faulty.fail_times(30, ConnectionRefusedError("no server"))
    with pytest.raises(OSError, match="no server"):
        store.read("a")
    faulty.fail(lambda operation, path: None)
    store.write("a", DATA)
    faulty.fail_times(30, ConnectionRefusedError("no server"))

    assert store.read("a") == (DATA, "")


def test_an_upload_that_fails_late_is_repeated(faulty, tmp_path):
    """The patience counts from the first failure: a large file takes longer than it."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    store = Store(URL, patience_s=0.1)
    store.names()

    def fault(operation, path):
        if operation == "put" and faulty.num("put") == 1:
            time.sleep(0.3)
            raise ConnectionResetError("reset at the last part")

    faulty.fail(fault)
    store.put("a", path)

    assert store.read("a") == (DATA, "")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PermissionError("Forbidden"), PermissionError),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), PermissionError),
        (IsADirectoryError("is a folder"), OSError),
        (NotImplementedError("this protocol cannot write"), NotImplementedError),
        (TypeError("wrong option"), TypeError),
    ],
    ids=repr,
)
def test_an_error_that_stays_ends_at_once(faulty, error, raised):
    """A repetition would only delay the message, which names the URL."""
    faulty.fail_times(1, error)

    with pytest.raises(raised) as refused:
        Store(URL).write("a", DATA)

    assert faulty.num("write") == 1
    if raised is PermissionError:
        assert str(refused.value).startswith(f"{URL}: could not write a: ")
        assert str(refused.value).endswith("; check the store's credentials and their permissions")


def test_credentials_that_have_worked_are_renewed(faulty):
    """Temporary ones expire while a run trains, and something else renews them."""
    store = Store(URL)
    store.write("a", b"1")
    faulty.fail_times(3, PermissionError("ExpiredToken"))

    store.write("a", b"2")

    assert store.read("a") == (b"2", "")


def test_a_store_with_another_patience_knows_that_the_first_has_worked(faulty, monkeypatch):
    """An outage at its first operation does not end a run that has read its checkpoints."""
    monkeypatch.setattr(module, "FIRST_PATIENCE_S", 0.01)
    store = Store(URL)
    store.write("a", b"1")
    other = store.with_patience(None)
    for error in (PermissionError("ExpiredToken"), TimeoutError("no answer")):
        faulty.fail_times(20, error)
        assert other.read("a") == (b"1", "")

    store.stop()  # ends only its own operations
    faulty.fail_times(5, TimeoutError("no answer"))

    assert other.read("a") == (b"1", "")


def test_a_stopped_store_does_not_repeat(faulty):
    """A thread that repeats an operation without end can be ended."""
    store = Store(URL, patience_s=None)
    store.names()
    faulty.fail_times(9999, TimeoutError("no answer"))
    thread = threading.Timer(0.1, store.stop)
    thread.start()

    with pytest.raises(OSError, match="no answer"):
        store.read("a")

    thread.join()


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_truncated_download_is_noticed_and_repeated(faulty, tmp_path, monkeypatch, is_checked):
    """Even that of a log, whose checksum is not known."""
    store = Store(URL)
    store.write("a", DATA)
    whole, ends = faulty.get_file, [10, 0, len(DATA)]

    def cut(self, rpath, lpath, **kwargs):
        whole(self, rpath, lpath, **kwargs)
        with open(lpath, "rb+") as file:
            file.truncate(ends.pop(0))

    monkeypatch.setattr(faulty, "get_file", cut)

    store.get("a", tmp_path / "a", sha256=hashlib.sha256(DATA).hexdigest() if is_checked else None)

    assert (tmp_path / "a").read_bytes() == DATA and not ends


def test_other_bytes_than_were_stored_are_not_accepted(faulty, tmp_path):
    """An object that somebody replaced does not become a checkpoint."""
    store = Store(URL, patience_s=0.05)
    store.write("a", b"other")

    with pytest.raises(Damaged, match=r"a is damaged: its checksum is wrong"):
        store.get("a", tmp_path / "a", sha256=hashlib.sha256(DATA).hexdigest())

    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_not_repeated(faulty, tmp_path):
    """An object, also below a prefix that another begins with, is missing at once."""
    store = Store(URL)
    Store(f"{URL}-2").write("a", DATA)

    with pytest.raises(FileNotFoundError):
        store.get("a", tmp_path / "a")

    assert store.read("a") is None and store.names() == [] and not list(tmp_path.iterdir())


def test_only_one_writer_creates_an_object(faulty):
    """All file systems of fsspec can do this."""
    one, other = Store(URL), Store(URL)

    assert one.write("lease", b"1", replaces="new") == ""
    with pytest.raises(Replaced):
        other.write("lease", b"2", replaces="new")

    assert one.read("lease") == (b"1", "")


def test_a_package_that_is_missing_is_named(monkeypatch):
    """The error also names the URL."""
    import fsspec

    def filesystem(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", filesystem)

    with pytest.raises(ImportError, match=r"^s3://bucket/run: Install s3fs to access S3"):
        Store("s3://bucket/run")


def test_of_two_writers_one_replaces_a_version(s3):
    """The other is told."""
    one, other = Store(s3.url()), Store(s3.url())
    first = one.write("lease", b"0", replaces="new")
    _, seen = other.read("lease")

    second = one.write("lease", b"1", replaces=first)
    with pytest.raises(Replaced):
        other.write("lease", b"2", replaces=seen)
    with pytest.raises(Replaced):
        other.write("lease", b"2", replaces="new")
    one.delete("lease")
    with pytest.raises(Replaced):
        other.write("lease", b"2", replaces=second)

    assert s3.names() == [] and first == seen != second


def test_a_version_belongs_to_the_bytes_that_are_read(s3, monkeypatch):
    """A writer in between is noticed, and so is one that deletes the object."""
    store, other = Store(s3.url()), Store(s3.url())
    store.write("lease", b"0")
    whole, changes = store.fs.cat_file, [lambda: other.write("lease", b"1"), lambda: other.delete("lease")]

    def read_late(path):
        data = whole(path)
        if changes:
            changes.pop(0)()
        return data

    monkeypatch.setattr(store.fs, "cat_file", read_late)

    assert store.read("lease") is None and not changes


def test_a_missing_bucket_is_named_at_once(s3, tmp_path):
    """Not each of its objects."""
    store = Store(f"s3://{s3.name}-2/run")
    (tmp_path / "file").write_bytes(DATA)

    reads = lambda: store.read("a"), store.names
    writes = lambda: store.write("a", DATA, replaces="new"), lambda: store.put("a", tmp_path / "file")
    for attempt in (*reads, *writes, lambda: store.write("a", DATA)):
        with pytest.raises(FileNotFoundError, match=rf"^{store.url}: .*; create the bucket first"):
            attempt()


def test_wrong_credentials_end_at_once(s3, s3_proxy):
    """The error says what to check, and not the key."""
    s3_proxy.set(Rule(proxy.DENIED))

    with pytest.raises(PermissionError, match="check the store's credentials") as refused:
        Store(s3.url()).read("a")

    assert s3_proxy.num_requests <= 3 and "a-secret" not in str(refused.value)


@pytest.mark.slow
def test_a_large_file_is_uploaded_in_parts(s3, s3_proxy, tmp_path):
    """A part that fails is repeated, and the object appears when it is complete."""
    content = bytes(range(256)) * 2**19  # 128 MiB, where s3fs writes parts
    (tmp_path / "file").write_bytes(content)
    store = Store(s3.url())
    s3_proxy.set(Rule(proxy.DROPPED, nth=1, method="PUT", path="partNumber=2"))

    store.put("a", tmp_path / "file")
    store.get("a", tmp_path / "copy", sha256=hashlib.sha256(content).hexdigest())

    assert s3_proxy.counts[proxy.DROPPED] == 1 and s3.uploads() == [] and s3.names() == ["run/a"]
