"""Tests that credentials of a store are written nowhere."""

import logging
import os
import traceback

import pytest

from runnerkit import read_metrics, write_report
from runnerkit.commands.cli import main
from runnerkit.storage.remote import store, uploads
from runnerkit.storage.remote.store import Store
from tests.faults import proxy
from tests.faults.proxy import Rule
from tests.free_port import free_port
from tests.storage.stored_runs import At, saving, train

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAQ7JX2MDZ5TESTKEY", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIsecretK7MDENGbPxRfiCYEX",
    "AWS_SESSION_TOKEN": "IQoJb3JpZ2luX2VjsessiontokenEXAMPLE",
}  # fmt: skip


@pytest.fixture(autouse=True)
def secrets(monkeypatch, s3, caplog):
    """Use credentials that are recognized everywhere, and log everything."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(uploads, "LOGS_EVERY_S", 0.0)
    caplog.set_level(logging.DEBUG, logger="runnerkit")


def found_in(text):
    """Return the names of the credentials in a text."""
    text = text if isinstance(text, bytes) else text.encode()
    return [name for name, value in SECRETS.items() if value.encode() in text]


def test_a_run_writes_its_credentials_nowhere(s3, staging, caplog, capsys, tmp_path):
    """Neither to the store, nor to the staging folder while it trains, nor to logs and reports."""
    inside = []

    def look():
        for path in staging.rglob("*"):
            if path.is_file():
                inside.append((path.name, found_in(path.read_bytes())))

    train(s3.url(), saving(s3.url()), At(look), num_epochs=1)
    read_metrics(s3.url())
    write_report(s3.url(), path=tmp_path / "report.html")
    assert main(["doctor", s3.url()]) == 0

    assert {name for name, _ in inside} >= {"hparams.yml", "environment.json", ".lock", ".place"}
    assert [name for name, names in inside if names] == []
    assert {name: found_in(data) for name, data in s3.objects().items() if found_in(data)} == {}
    assert found_in(caplog.text) == found_in(capsys.readouterr().out) == []
    assert found_in((tmp_path / "report.html").read_bytes()) == []


def test_a_lease_names_no_credentials(s3):
    """It is written while a run trains, and says which process does."""
    seen = []

    train(s3.url(), At(lambda: seen.append(s3.read("run/lease.json")), step=1), num_epochs=1)

    assert f"process {os.getpid()} on".encode() in seen[0] and found_in(seen[0]) == []


@pytest.mark.parametrize("kind", [proxy.DENIED, "wrong endpoint"])
def test_an_error_names_no_credentials(s3, s3_proxy, monkeypatch, caplog, capsys, kind):
    """Wrong keys and a wrong endpoint are the errors that users show to others."""
    monkeypatch.setattr(store, "FIRST_PATIENCE_S", 0.5)
    if kind == "wrong endpoint":
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    else:
        s3_proxy.set(Rule(kind))

    with pytest.raises(OSError, match=f"^{s3.url()}: could not write lease.json") as refused:
        train(s3.url(), num_epochs=1)
    code = main(["metrics", s3.url()])

    chain = [refused.value]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    printed = capsys.readouterr()
    assert code == 2 and s3.url() in printed.err
    assert found_in("".join(map(repr, chain)) + caplog.text + printed.out + printed.err) == []


def test_a_url_with_a_password_is_not_repeated(capsys):
    """The error says what to do instead."""
    assert main(["metrics", "sftp://me:AKIAQ7JX2MDZ5TESTKEY@host/run"]) == 2

    printed = capsys.readouterr()
    assert "remove the credential" in printed.err and found_in(printed.out + printed.err) == []


@pytest.mark.parametrize("kind", [RuntimeError, PermissionError, ValueError])
def test_a_cause_with_credentials_is_redacted(faulty, monkeypatch, kind):
    """A library's message may have the request's headers; a traceback does not show it."""
    monkeypatch.setattr(store, "FIRST_PATIENCE_S", 0.05)
    secret = SECRETS["AWS_SECRET_ACCESS_KEY"]
    faulty.fail_times(999, kind(f"request failed: {{'aws_secret_access_key': '{secret}'}}"))

    with pytest.raises(OSError, match="could not list objects") as refused:
        Store("faulty://runs/mine").names()

    assert found_in("".join(traceback.format_exception(refused.value))) == []
