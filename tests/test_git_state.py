"""Tests of the commit and the uncommitted changes that a run records."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runnerkit import dl
from runnerkit.support import git_state
from runnerkit.support.git_state import describe_commit, redacted_diff, uncommitted_diff
from tests.tiny import train

SECRET = "correct-horse-battery-staple"
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a repository with one commit, in which the script lies."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "topic")
    (folder / "train.py").write_text("lr = 0.1\n")
    (folder / ".env").write_text("nothing\n")
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(sys, "argv", [str(folder / "train.py")])
    monkeypatch.setattr(git_state, "_TIMEOUT_S", 60.0)
    return folder


def test_a_run_records_commit_branch_and_changes(repository: Path, tmp_path: Path) -> None:
    """environment.json has what git says, and no files that usually hold credentials."""
    (repository / "train.py").write_text("lr = 0.2\n")
    (repository / ".env").write_text(f"{SECRET}\n")

    train(logdir=tmp_path / "run")

    recorded = json.loads((tmp_path / "run" / "environment.json").read_text())["git"]
    assert recorded.pop("diff").splitlines()[-2:] == ["-lr = 0.1", "+lr = 0.2"]
    assert recorded == {"commit": git(repository, "rev-parse", "HEAD"), "branch": "topic", "has_changes": True}
    assert SECRET not in (tmp_path / "run" / "environment.json").read_text()


def test_changes_that_the_diff_does_not_show_count(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of files that usually hold credentials, and those that git does not find in time."""
    (repository / ".env").write_text(f"{SECRET}\n")

    assert describe_commit()["has_changes"] is True and uncommitted_diff() == ""

    git(repository, "checkout", "--quiet", ".env")
    slow = repository.with_name("slow")
    repository.rename(slow)
    monkeypatch.setattr(sys, "argv", [str(slow / "train.py")])
    ask = subprocess.run

    def in_time(command: list[str], **options: object) -> object:
        if "rev-parse" in command:
            return ask(command, **options)  # type: ignore[call-overload]
        raise subprocess.TimeoutExpired(command, 5)

    monkeypatch.setattr("runnerkit.support.git_state.subprocess.run", in_time)
    assert describe_commit()["has_changes"] is None  # unknown


def test_changes_can_be_left_out(repository: Path, tmp_path: Path) -> None:
    """save_diff=False records the commit only."""
    (repository / "train.py").write_text("lr = 0.2\n")

    train(logdir=tmp_path / "run", loggers={"csv": dl.CSVLogger(tmp_path / "run", save_diff=False)})

    recorded = json.loads((tmp_path / "run" / "environment.json").read_text())["git"]
    assert recorded.keys() == {"commit", "branch", "has_changes"}


def test_services_are_not_sent_the_changes(repository: Path, tmp_path: Path) -> None:
    """Loggers are passed the commit; only the file has the diff."""
    (repository / "train.py").write_text("lr = 0.2\n")

    class Mine(dl.ILogger):
        def log_scalars(self, *_: object, **__: object) -> None: ...

        def log_hparams(self, hparams: object, *, environment: dict) -> None:  # type: ignore[override]
            self.environment = environment

    logger = Mine()
    train(loggers={"mine": logger})

    assert logger.environment["git"]["has_changes"] is True
    assert "lr = 0.2" not in json.dumps(logger.environment)


def test_without_a_repository_or_git_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a repository, and where git is not installed, the facts are left out."""
    for name in ("outside", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").touch()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path / "outside")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "outside" / "train.py")])

    assert (describe_commit(), uncommitted_diff()) == ({}, "")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "without" / "train.py")])
    monkeypatch.chdir(tmp_path / "without")
    monkeypatch.setenv("PATH", "")
    assert (describe_commit(), uncommitted_diff()) == ({}, "")


@pytest.mark.parametrize(
    "line",
    [
        f"+API_KEY = '{SECRET}'",
        f'-    os.environ["HF_TOKEN"] = "{SECRET}"',
        f'+headers = {{"Authorization": "Bearer {SECRET}"}}',
        f"+    run(password='{SECRET}')",
        f"+url: https://me:{SECRET}@host/x",
        f'@@ -10,6 +10,7 @@ API_KEY = "{SECRET}"',
        f'+API_KEY: str = "{SECRET}"',
        f'+    self.password = "{SECRET}"',
        f"+openai.api_key = '{SECRET}'",
        f'+PASSWORD = b"{SECRET}"',
        f'+PASSWORD = """{SECRET}"""',
        f'+    if password == "{SECRET}":',
        f'+const apiKey = "{SECRET}";',
        f"+export WANDB_API_KEY={SECRET}",
        f"+ENV HF_TOKEN={SECRET}",
        f"+    --password {SECRET} \\",
        f"+password: my {SECRET} phrase",
        f"+password:\n+  {SECRET}",
        f'+PASSWORD = (\n+    "{SECRET}"\n+)',
        f"+-----BEGIN RSA PRIVATE KEY-----\n+{SECRET}\n+-----END RSA PRIVATE KEY-----",
        f'+wandb.login(key="{SECRET}-{SECRET}")',
        f'+os.environ.setdefault("HF_TOKEN", "{SECRET}")',
        f"+    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', '{SECRET}')",
        f'+connection = "AccountName=a;AccountKey={SECRET}"',
        f'+export FSSPEC_S3=\'{{"key": "a", "secret": "{SECRET}"}}\'',
        f'+url = "https://a.blob.core.windows.net/c?sv=1&sig={SECRET}"',
        f"+AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY={SECRET} python train.py",
        f"+sas_token: {SECRET}",
    ],
)
def test_credentials_in_changes_are_hidden(line: str) -> None:
    """In any form in which they are recognized elsewhere, and as an item of os.environ."""
    assert SECRET not in redacted_diff(f" lr = 0.1\n{line}\n")
    assert redacted_diff(f" lr = 0.1\n{line}\n").startswith(f" lr = 0.1\n{line[0]}")


def test_a_long_diff_is_cut() -> None:
    """Its last line tells how much is missing."""
    diff = redacted_diff("+a = 1\n" * 20_000)

    assert len(diff) < 100_100
    assert diff.endswith("... 40,000 more characters")


def test_code_without_credentials_stays_as_it_is() -> None:
    """Names that resemble credentials, keys of dicts and heads of functions are not hidden."""
    code = [
        "@@ -1,3 +1,4 @@ def forward(self, x):", '+mask_token = "[MASK]"', " for token in tokens:", "+    x = 1",
        '+def read(key: str = "image") -> None:', "-lr: float = 0.1", '+batch["key"] = value', "+num_tokens = 3",
        '+os.environ.setdefault("LR", "0.1")', '+sizes = ["token", "word"]', '+run("a=b;c=d", signature="(int, int)")',
    ]  # fmt: skip

    assert redacted_diff("\n".join(code)).splitlines() == code


def test_lines_of_data_are_cut_and_take_no_time() -> None:
    """A run does not wait for patterns over a long line, of a notebook's picture or a table in hexadecimal digits."""
    began = time.process_time()

    for line in ("a" * 99_000, "-" * 99_000, "(a," * 33_000, 'a="' * 33_000):
        assert len(redacted_diff(f"+{line}")) < 2_000

    assert time.process_time() - began < 5  # it took minutes


def test_folders_of_credentials_are_left_out_and_count_as_changes(repository: Path) -> None:
    """A pattern without "/**" would match files only."""
    for name in ("secrets/prod.yaml", "prod.env", "id_ed25519"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("nothing\n")
    git(repository, "add", "-A")
    git(repository, "commit", "--quiet", "-m", "second")
    for name in ("secrets/prod.yaml", "prod.env", "id_ed25519"):
        (repository / name).write_text(f"{SECRET}\n")

    assert uncommitted_diff() == ""
    assert describe_commit()["has_changes"] is True


def test_a_git_that_takes_too_long_says_nothing_about_changes(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is not called unchanged because nobody could look."""
    run = subprocess.run

    def slow(command: list[str], **options: object) -> object:
        if "diff" in command:
            raise subprocess.TimeoutExpired(command, 5)
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(git_state.subprocess, "run", slow)

    assert (describe_commit()["has_changes"], uncommitted_diff()) == (None, "")


@pytest.mark.parametrize("program", ["site-packages/ipykernel_launcher.py", "runnerkit"])
def test_the_repository_of_a_package_is_not_the_users(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """A Python that pyenv or Homebrew installed lies in their repositories; so may runnerkit."""
    if program == "runnerkit":
        script = Path(git_state.__file__).parents[1] / "__main__.py"
    else:
        other = tmp_path / "pyenv"
        script = other / program
        script.parent.mkdir(parents=True)
        script.touch()
        git(other, "init", "--quiet")
        git(other, "add", "-A")
        git(other, "commit", "--quiet", "-m", "not the user's")
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.chdir(repository)

    assert describe_commit()["commit"] == git(repository, "rev-parse", "HEAD")


def test_a_working_directory_that_was_deleted_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run there records nothing."""
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(folder)
    os.rmdir(folder)

    assert (describe_commit(), uncommitted_diff()) == ({}, "")
