"""Tests of URLs of logdirs and of the local folders that stand for them."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from runnerkit import dl
from runnerkit.commands.cli import main
from runnerkit.storage.remote import urls
from runnerkit.storage.remote.copies import local_copy, name_of
from runnerkit.storage.remote.store import Store
from runnerkit.storage.remote.urls import STAGING, as_url, folder_for, local_path, plain_path, shown, url_of
from runnerkit.utils import get_averaged_weights_by_path_mask
from tests.test_configured_run import CONFIG

AWKWARD = ["a b", "a, b", "50%", "a%20b", "a#b", "a?b", "a;b=c", "über", "日本", "[1-2]*", "a\udcffb"]

NAMES = st.text(st.characters(exclude_characters="/@", exclude_categories=["Cs"]), min_size=1, max_size=300)
URLS = st.builds(lambda protocol, names: f"{protocol}://{'/'.join(names)}", st.sampled_from(["s3", "memory", "gs"]),
                 st.lists(NAMES, min_size=1, max_size=4))  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(URLS)
def test_a_folder_stands_for_one_url(url):
    """The URL is found from the folder, and each of the folder's names fits into a file system."""
    folder = folder_for(url, urls.root())

    assert url_of(folder) == url
    assert url_of(folder / "csv" / "train.csv") == f"{url}/csv/train.csv"
    assert folder.is_relative_to(urls.root()) and ".." not in folder.parts
    assert max(len(os.fsencode(part)) for part in folder.parts) <= 255


@pytest.mark.parametrize("end", [".", "..", "...", ".lock", "+", ",", ",,"])
@pytest.mark.parametrize("length", [1, *range(190, 194), 390, 391, 392])
def test_a_name_that_is_split_has_no_part_that_leads_elsewhere(end, length):
    """The parts of a long name are never "." or "..", which file systems resolve."""
    url = f"memory://{'a' * length}{end}"

    folder = folder_for(url, urls.root())

    assert url_of(Path(os.path.normpath(folder))) == url
    assert os.path.normpath(folder) == str(folder)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(URLS, URLS)
def test_two_urls_have_two_folders(one, other):
    assert (folder_for(one, urls.root()) == folder_for(other, urls.root())) == (one == other)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("S3://bucket//run/", "s3://bucket/run"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("memory:///run", "memory://run"),
        ("s3://arn:aws:s3:eu-west-1:1:accesspoint/points/run", "s3://arn:aws:s3:eu-west-1:1:accesspoint/points/run"),
        ("s3://arn:aws:s3:eu-west-1:1:accesspoint/points/a@b", "s3://arn:aws:s3:eu-west-1:1:accesspoint/points/a@b"),
        ("hdfs://host:8020/me@home/run", "hdfs://host:8020/me@home/run"),
        ("logs/run", None),
        ("C:/logs/run", None),
        ("C:\\logs\\run", None),
        ("/logs/a:b/run", None),
        ("notes:/run", None),
        ("file:///logs/run", None),
        (b"s3://bucket/run", None),
    ],
)
def test_a_url_is_told_from_a_local_path(given, url):
    """A :class:`Path` may have removed a slash; a local path may contain a colon."""
    assert as_url(given) == url


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("s4://bucket/run", "fsspec does not know s4://, but .*s3"),
        ("simplecache::s3://bucket/run", "chains of protocols are not supported"),
        ("zip://run::s3://bucket/a.zip", "chains of protocols are not supported"),
        *((f"sftp://me:{each}secret@host/run", "remove the credential") for each in ("", "a#", "a?", "a/b")),
        (Path("s4://me:secret@host/run"), "remove the credential"),
        (Path("simplecache::ftp://me:secret@host/run"), "chains of protocols"),
        *((f"az://box/run?sv=1&{each}=secret-secret-secret", "remove the credential") for each in ("sig", "token")),
        ("s3://bucket/a?X-Amz-Signature=secret-secret-secret&versionId=1", "remove the credential"),
        ("simplecache::ftp://me:secret@host/run", "chains of protocols"),
        ("s3://bucket/data.bin?versionId=1", "is one version of an object"),  # s3fs would take it for the folder
        ("s3://", "names no bucket or folder"),
        ("memory:///", "names no bucket or folder"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(given, words):
    """The error says what to pass, and contains no password."""
    with pytest.raises(ValueError, match=words) as refused:
        as_url(given)

    assert "secret" not in str(refused.value)


def test_a_file_url_is_a_local_path(tmp_path):
    """It is absolute, as other local paths are."""
    assert local_path(f"file://{tmp_path}/run") == tmp_path / "run"
    for each in (tmp_path, tmp_path.as_uri(), Path(tmp_path.as_uri())):  # a path has lost two slashes
        assert local_path(each) == local_copy(each) == tmp_path
    assert local_path("run") == Path.cwd() / "run"


@pytest.mark.parametrize("name", AWKWARD, ids=ascii)
def test_the_percent_encoding_of_a_file_url_is_decoded(tmp_path, name):
    """As in RFC 8089, :meth:`Path.from_uri`, pandas and pyarrow; a path that is not a URL stays as it is."""
    path = tmp_path / name

    for each in (path.as_uri(), Path(path.as_uri()), path.as_uri().replace("file:", "FILE:"), path):
        assert local_path(each) == local_copy(each) == name_of(each) == path
    if "%" not in name:  # not encoded: "?" and "#" begin no other part of a file URL
        assert local_path(f"file://{path}") == path


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("file://localhost/logs/run", "/logs/run"),
        ("file://LOCALHOST/logs/a%20b", "/logs/a b"),
        ("local:///logs/run", "/logs/run"),
        ("file:/logs/run", "/logs/run"),
        ("file:////logs//run/", "/logs/run"),
        ("file:///logs/%2e%2E/run", "/logs/../run"),
        ("file:///logs/100%", "/logs/100%"),
        ("file:///logs/%2520", "/logs/%20"),
    ],
)
def test_forms_of_a_file_url(given, path):
    """The host may be this machine; what is decoded is not decoded again."""
    assert local_path(given) == local_path(local_path(given)) == Path(path)


def test_a_file_url_with_a_drive_of_windows(monkeypatch):
    monkeypatch.setattr(urls.sys, "platform", "win32")

    assert plain_path("file:///C:/my%20logs/run") == Path("C:/my logs/run")
    assert plain_path("file:///logs/run") == Path("/logs/run")


@pytest.mark.parametrize(
    "given", ["file://logs/run", "file://run", "file://", "file://localhost", "file://me:secret@server/run"]
)
def test_a_file_url_of_another_host_or_without_a_path_is_refused(given):
    """The first form wrote to /logs/run. The error contains no password."""
    with pytest.raises(ValueError, match="not the URL of an absolute path on this machine: pass file:///") as refused:
        local_path(given)

    assert "secret" not in str(refused.value)


def test_functions_and_commands_take_file_urls_of_odd_folders(tmp_path, monkeypatch, capsys):
    """Some wrote to a folder "file:" or did not find the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yml").write_text(CONFIG)
    logdir = tmp_path / "a run, 50% #1"
    url, here = logdir.as_uri(), tmp_path.as_uri()
    last, run = f"{url}/checkpoints/last.pth", ["run", "config.yml", "--logdir", url]
    export = ["export", "--to", "safetensors"]

    for command in (
        run, [*run, "--resume"], ["run", f"{here}/config.yml", "--logdir", f"{here}/%C3%A4"], ["metrics", url],
        ["watch", url, "--once"], ["doctor", url], ["report", url], [*export, url],
        [*export, last, f"{here}/an%20export.safetensors"],
    ):  # fmt: skip
        assert main(command) == 0, f"{command}: {capsys.readouterr().err}"
    capsys.readouterr()
    assert main(run) == 2 and "contains a run" in capsys.readouterr().err
    assert main([*export, url, here]) == 2 and "is a folder" in capsys.readouterr().err
    assert dl.SupervisedRunner().load(url, model=configured(), which="last")
    averaged = get_averaged_weights_by_path_mask(f"{url}/checkpoints/last.*")

    assert averaged.keys() == configured().state_dict().keys()
    assert {each.name for each in tmp_path.iterdir()} == {logdir.name, "an export.safetensors", "config.yml", "ä"}
    assert {"config.yml", "report.html", "model.safetensors"} <= {each.name for each in logdir.iterdir()}


def configured():
    """Return the model of the config."""
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3))


def test_a_key_in_a_store_is_not_decoded(url, request, tmp_path):
    """It has the characters of the URL, as with fsspec and the AWS command line."""
    file, names = tmp_path / "file", ["a, b 50%;c=d", "a%20b#c?d", "über 日本 [1-2]*"]

    for name in names:
        store = Store(as_url(f"{url}/{name}"))
        store.write("csv/a b%.csv", name.encode())
        file.write_text(name)
        store.put("put", file)
        store.get("put", tmp_path / "got")

        assert store.names() == ["csv/a b%.csv", "put"] and store.read("csv/a b%.csv")[0] == name.encode()
        assert (tmp_path / "got").read_text() == name
        assert (local_copy(f"{url}/{name}") / "csv" / "a b%.csv").read_text() == name

    keys = {f"{name}/{each}" for name in names for each in ("csv/a b%.csv", "put")}
    assert set(Store(url).names()) == keys
    if url.startswith("s3"):
        assert set(request.getfixturevalue("s3").names()) == {f"run/{key}" for key in keys}


@pytest.mark.parametrize("protocol", ["ftp", "hdfs", "webhdfs"])
def test_a_store_that_would_leave_out_a_part_of_the_key_is_refused(protocol):
    """For fsspec, a question mark begins the arguments of these: a run in "lr?1" wrote to "lr", as one in "lr?2"."""
    with pytest.raises(ValueError, match=r"lr\?1.* takes .*\?.* for .*arguments"):
        Store(f"{protocol}://host/runs/lr?1")


def test_the_staging_folder_is_where_the_variable_says(tmp_path, monkeypatch):
    """It is private, and messages show its URL."""
    monkeypatch.setenv(STAGING, str(tmp_path / "mine"))

    folder = local_path("s3://bucket/run")

    assert folder == tmp_path / "mine" / "s3,,bucket,run"
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    assert shown(folder / "checkpoints") == "s3://bucket/run/checkpoints" and shown(tmp_path) == str(tmp_path)


def test_without_the_variable_it_is_a_private_temporary_folder(tmp_path, monkeypatch):
    """Its name has the user's number, since all users share the folder of temporary files."""
    monkeypatch.delenv(STAGING)
    monkeypatch.setattr(urls.tempfile, "gettempdir", lambda: str(tmp_path))

    assert urls.root() == tmp_path / f"runnerkit-{os.getuid()}"
    assert urls.root().stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    """Another user could exchange checkpoints in it."""
    monkeypatch.setenv(STAGING, str(tmp_path / "theirs"))
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)

    with pytest.raises(PermissionError, match=f"belongs to another user: set {STAGING}"):
        local_path("s3://bucket/run")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_a_link_that_another_user_planted_is_refused(tmp_path, monkeypatch):
    """Even one to a folder of this user, which is not meant for checkpoints; a link of this user is followed."""
    (tmp_path / "private").mkdir()
    for name in ("planted", "own"):
        (tmp_path / name).symlink_to(tmp_path / "private")
    os.chown(tmp_path / "planted", 12345, 12345, follow_symlinks=False)

    monkeypatch.setenv(STAGING, str(tmp_path / "planted"))
    with pytest.raises(PermissionError, match=f"belongs to another user: set {STAGING}"):
        local_path("s3://bucket/run")
    monkeypatch.setenv(STAGING, str(tmp_path / "own"))

    assert local_path("s3://bucket/run").parent == tmp_path / "private"
