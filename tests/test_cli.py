"""Tests of the command `runnerkit`: help, completion, exit codes and the examples in docs/cli.md."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from runnerkit import __version__
from runnerkit.__main__ import main as run_module
from runnerkit.commands.cli import main

ROOT = Path(__file__).parents[1]
EXPORTS = ("onnx", "torch-export", "safetensors")
PAGE = ROOT / "docs" / "cli.md"
COMMANDS = [
    "run",
    "tune",
    "export",
    "new",
    "env",
    "metrics",
    "plot",
    "watch",
    "report",
    "fetch",
    "doctor",
    "docs",
    "schema",
]


def test_the_help_names_every_command(capsys):
    """The help lists every command with a description; a call without a command exits with code 2."""
    assert main(["--help"]) == 0
    listed = re.findall(r"^  (\w+)  +[A-Z]", capsys.readouterr().out.partition("Commands:")[2], flags=re.MULTILINE)

    assert set(COMMANDS) <= set(listed)
    assert main([]) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example(command, capsys):
    """The help of each command has an example of that command."""
    assert main([command, "-h"]) == 0

    assert f"Example: runnerkit {command} " in " ".join(capsys.readouterr().out.split())


def test_the_version_is_the_packages(capsys):
    """`--version` prints the package version on one line."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"runnerkit {__version__}\n"


def test_the_shell_completes_commands_and_options(capsys, monkeypatch):
    """Bash completion completes the word at the cursor: a command or an option."""
    completed = []
    for words in ("runnerkit doct", "runnerkit run --en"):
        monkeypatch.setenv("_RUNNERKIT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert main([]) == 0
        completed.append(capsys.readouterr().out.split())

    assert completed == [["doctor"], ["--engine"]]


@pytest.mark.cold
def test_completion_and_help_do_without_torch():
    """Completion and help do not import torch, which takes a second or more."""
    code = "import sys; from runnerkit.__main__ import main; main(); print(sorted({'torch', 'numpy'} & {*sys.modules}))"
    asked = {"_RUNNERKIT_COMPLETE": "complete_bash", "COMP_WORDS": "runnerkit ru", "COMP_CWORD": "1"}

    def printed(*arguments, **variables):
        command = [sys.executable, "-c", code, *arguments]
        environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert printed(**asked) == "run\n[]\n"
    shown = printed("run", "--help")
    assert shown.startswith("Usage: runnerkit run ") and shown.endswith("\n[]\n")


def test_without_typer_a_sentence_says_so(capsys, monkeypatch):
    """Without typer, the command prints how to install it instead of a traceback."""
    monkeypatch.setitem(sys.modules, "typer", None)

    assert run_module() == 2
    assert capsys.readouterr().err == "runnerkit: the command line needs the package typer: pip install typer\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "No such command 'trian'"),
        (["run"], "Missing argument 'FILE'"),
        (["run", "x.yaml", "--nproc", "two"], "Invalid value for '--nproc'"),
        *((["export", ".", "--to", to, "-o", "."], "cannot write .: it is a folder; pass the path") for to in EXPORTS),
        (["export", "logs", "--to", "tflite"], "'tflite' is not one of 'onnx', 'torch-export', 'safetensors', 'hf'"),
    ],
)
def test_what_the_command_line_does_not_take_is_named(arguments, words, capsys):
    """Invalid commands, options, values and outputs that are folders are named, with exit code 2."""
    assert main(arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def run_line(line):
    """Run a command in this process, or a script in its own, because it replaces the process; return the exit code."""
    program, *arguments = shlex.split(line)
    assert program == "runnerkit"
    if arguments[0] != "run" or not arguments[1].endswith(".py"):
        return main(arguments)
    command = [sys.executable, "-m", "runnerkit", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    """All commands of docs/cli.md run in order in one folder that holds the page's YAML blocks as files."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    for block in re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        Path(block.splitlines()[0].removeprefix("# ")).write_text(block)

    commands = "".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)).splitlines()
    codes = {command: run_line(command) for command in commands}

    assert len(codes) >= 10 and set(codes.values()) == {0}, capsys.readouterr().err
