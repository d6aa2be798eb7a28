"""Tests that credentials from any source are not written to the files of a run."""

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from runnerkit.commands.cli import main
from runnerkit.history.report import write_report
from runnerkit.support.redaction import redacted, redacted_command
from tests.test_configured_run import CONFIG
from tests.tiny import train

SECRET = "correct-horse-battery-staple"


def files_with(text, folder):
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "words",
    [["--api-key", SECRET], [f"--password={SECRET}"], [f"loggers.comet.api_key={SECRET}"], ["--hf-token", SECRET],
     [f"--store=s3://me:{SECRET}@host/x"], ["--apiKey", SECRET], [f"AWS_SECRET_ACCESS_KEY={SECRET}"],
     ["--header", f"Authorization: Bearer {SECRET}"]],
)  # fmt: skip
def test_a_credential_on_the_command_line_is_not_in_environment_json_nor_in_the_report(tmp_path, monkeypatch, words):
    """Credentials on the command line and in hparams are in no file of the logdir; the other arguments are kept."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--lr=0.1"])
    monkeypatch.chdir(tmp_path)  # no repository: changes of this file hold the secret
    train(hparams={"lr": 0.1, "service": {"token": SECRET}, "pad_token": "[PAD]"}, logdir=tmp_path)

    report = write_report(tmp_path)

    assert files_with(SECRET, tmp_path) == []
    assert "--lr=0.1" in (tmp_path / "environment.json").read_text() and "train.py" in Path(report).read_text()
    assert "[PAD]" in (tmp_path / "hparams.yml").read_text()


@pytest.mark.parametrize(
    "words",
    [
        *[[f"--{name}", SECRET] for name in ("user-token", "openai-key", "wandb-key", "db-pass", "pwd", "passwords")],
        [f"--slack-token={SECRET}"], ["--api-keys", SECRET], ["--password", f"-{SECRET}"], ["-password", SECRET],
        ["--header", f"X-Api-Key: {SECRET}"], ["--config", f'{{"lr": 1, "api_key": "{SECRET}"}}'],
        ["--authtoken", SECRET], [f"PGPASSWORD={SECRET}"], ["--signing-key", SECRET],
        ["--header", f"Authorization: Token {SECRET}"],
        [f'{{"password": "my {SECRET} phrase"}}'], [f'{{\\"password\\": \\"{SECRET}\\"}}'],
        [f"${{oc.env:USER}} --password={SECRET}"],
        [f"postgres://me:p@{SECRET}@host/x"], [f"glpat-{SECRET}-{SECRET}"], ["train.py --lr=1 --password=" + SECRET],
        [f"--url=https://host/x?a=1&api_key={SECRET}"], ["--url", f"https://host/x?api_key={SECRET}&a=1"],
    ],
    ids=str,
)  # fmt: skip
def test_a_credential_in_a_word_of_the_command_is_hidden(words):
    """Names of services, plurals, short forms, headers, JSON and queries of a URL are recognized."""
    command = redacted_command([*words, "--lr", "1"])

    assert SECRET not in str(command) and "***" in str(command)
    assert command[-2:] == ["--lr", "1"]


@pytest.mark.parametrize(
    "text",
    [
        f"https://a.blob.core.windows.net/c/run?sv=2022&sp=rl&sig={SECRET}", f"SharedAccessSignature=sv=1&sig={SECRET}",
        f"https://b.s3.amazonaws.com/x?AWSAccessKeyId=a&Signature={SECRET}&Expires=1", f"?sv=1&sig={SECRET}%3D",
        f"https://storage.googleapis.com/b/x?X-Goog-Credential=a&X-Goog-Signature={SECRET}",
        f"AWS4-HMAC-SHA256 Credential=a/2026/us-east-1/s3, SignedHeaders=host, Signature={SECRET}",
        f'FSSPEC_S3=\'{{"key": "a", "secret": "{SECRET}"}}\'', f'connection="AccountName=a;AccountKey={SECRET};E=b"',
        f"env AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY={SECRET} python train.py", f"refused: Bearer {SECRET}0",
        f"s3://me:a/{SECRET}/b@bucket/run",
        {"sas_token": SECRET}, {"SSECustomerKey": SECRET}, {"storage_options": {"key": "a", "secret": SECRET}},
    ],
    ids=str,
)  # fmt: skip
def test_credentials_of_stores_are_hidden(text):
    """Signed URLs, tokens and connection strings of S3, Azure and Google, and credentials within a quoted value."""
    assert SECRET not in str(redacted(text)) and "***" in str(redacted(text))


@dataclass
class Service:
    url: str
    api_key: str


class Tuple(NamedTuple):
    url: str
    api_key: str


@dataclass(slots=True)
class Slots:
    """A user's settings, without a ``__dict__``."""

    url: str
    api_key: str


@pytest.mark.parametrize("kind", [Service, Slots, Tuple, Namespace, SimpleNamespace])
def test_credentials_in_namespaces_and_dataclasses_are_hidden(kind):
    """Their fields become a dict; otherwise they would be written as a string."""
    values = {"service": kind(url=f"https://host?token={SECRET}", api_key=SECRET), "header": f"api-key: {SECRET}"}

    expected = {"service": {"url": "https://host?token=***", "api_key": "***"}, "header": "api-key: ***"}
    assert redacted(values) == expected


def test_an_object_that_contains_itself_ends():
    """Nesting is cut at a depth that no hyperparameters have."""
    namespace = Namespace(lr=0.1)
    namespace.itself = namespace

    assert redacted({"args": namespace})["args"]["itself"]["lr"] == 0.1


def test_what_names_no_credential_stays():
    """Names that resemble credentials, such as `num_tokens`, are not redacted."""
    texts = {"text": "https://host/x?page=2, num_tokens: 3, key: a", "prose": "Each token: one word; the secret: none",
             "more": "Bearer of news; signature=(int, int), sig=0.1, a signature=none&sig=b, LR=1 SEED=3",
             "url": "hdfs://host:8020/me@home/run, s3://arn:aws:s3:eu-west-1:1:accesspoint/points/a@b"}  # fmt: skip
    names = ["num_tokens", "mask_token", "loader_key", "tokenizer", "pass", "sort_key", "bos_token", "max_token"]
    names += ["cost_per_token", "class_token", "user_key", "session_tokens", "key"]
    values = {**texts, **dict.fromkeys(names, "a"), "secret": None, "num_token": 3}
    words = ["run.py", "--input-key", "x", "--max-tokens=5", "--token", "--lr", "1", "token=${oc.env:TOKEN}"]

    assert redacted(values) == values and redacted_command(words) == words


def test_values_of_the_environment_stay_out_of_all_files_of_a_configured_run(tmp_path, monkeypatch):
    """Environment variables are saved as references in all files, and the saved config reproduces the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_VALUE", SECRET)
    monkeypatch.setenv("MY_RATE", "0.07654321")
    config = CONFIG.replace(
        "hparams: {lr: 0.1, width: 16}",
        "hparams:\n  lr: ${oc.decode:${oc.env:MY_RATE}}\n  width: 16\n  plain: ${oc.env:MY_VALUE}\n"
        "  again: ${hparams.plain}\n  within: 'Bearer ${oc.env:MY_VALUE}'\n  other: \"${oc.env:MY_OTHER,'a, b: c'}\"",
    )
    Path("config.yaml").write_text(config)

    assert main(["run", "config.yaml"]) == 0
    assert main(["run", "logs/config/config.yml"]) == 0

    assert files_with(SECRET, tmp_path) == []
    for name in ("config", "config-2"):
        saved = Path("logs", name, "config.yml").read_text()
        assert "lr: ${oc.decode:${oc.env:MY_RATE}}" in saved and "again: ${oc.env:MY_VALUE}" in saved
        assert "width: 16" in saved and "in_features: 16" in saved and "Bearer ${oc.env:MY_VALUE}" in saved
        assert "lr: ${oc.decode:${oc.env:MY_RATE}}" in Path("logs", name, "hparams.yml").read_text()
    tables = [Path("logs", name, "csv", "train.csv").read_text() for name in ("config", "config-2")]
    assert tables[0] == tables[1] and "0.07654321" in tables[0]
