"""Tests of `runnerkit docs`, which prints the pages that the package contains, and of llms.txt, which lists them."""

import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runnerkit import dl
from runnerkit.commands import docs_pages
from runnerkit.commands.cli import main
from runnerkit.commands.docs_pages import llms_txt, page_text, pages
from tests.json_output import output

DOCS = Path(__file__).parents[1] / "docs"


def test_every_page_is_a_topic_with_a_title_and_a_summary(capsys):
    """The list names all pages, the start page first; the first sentence of a page is its summary."""
    topics = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}

    shown = output(capsys, "docs")["topics"]
    assert main(["docs"]) == 0

    printed = capsys.readouterr().out
    assert {each["topic"] for each in shown} == topics and shown[0]["topic"] == "index"
    assert all(each["title"] and len(each["summary"]) > 15 for each in shown)
    assert [line.split()[0] for line in printed.splitlines()] == [each["topic"] for each in shown]
    assert re.search(r"^cli +The command line$", printed, flags=re.MULTILINE)


@pytest.mark.parametrize("topic", ["cli", "cli.md", "docs/cli.md", "migration/lightning"])
def test_a_page_is_printed_as_it_is(topic, capsys):
    assert main(["docs", topic]) == 0

    assert (
        capsys.readouterr().out.strip() == (DOCS / topic.removeprefix("docs/")).with_suffix(".md").read_text().strip()
    )


def test_a_page_is_printed_where_the_output_lacks_its_characters():
    """A pipe of Windows does not hold each of them; the others are printed."""
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent), "PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, "-m", "runnerkit", "docs", "engines"]

    printed = subprocess.run(command, env=environment, capture_output=True, check=True).stdout

    page = (DOCS / "engines.md").read_text(encoding="utf-8").encode("cp1252", "backslashreplace")
    assert b"\\u" in page and printed.split() == page.split()


def test_a_page_of_the_reference_has_signatures_and_docstrings(capsys):
    """The names of the page are replaced by what Python knows about them."""
    text = output(capsys, "docs", "reference/callbacks")["text"]

    assert "\n:::" not in text
    assert f"AccuracyCallback{inspect.signature(dl.AccuracyCallback)}" in text
    assert inspect.getdoc(dl.CheckpointCallback) in text


@pytest.mark.parametrize("page", sorted((DOCS / "reference").glob("*.md")), ids=lambda page: page.stem)
def test_every_name_of_the_reference_is_described(page):
    text = page_text(f"reference/{page.stem}")

    names = re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)
    assert names and [name for name in names if f"### {name}\n" not in text] == []


def test_an_unknown_page_is_refused_with_those_that_are_near(capsys):
    assert main(["docs", "checkpoint"]) == 2
    assert "there is no page 'checkpoint'; choose from checkpoints" in capsys.readouterr().err


def test_without_pages_an_error_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="install"):
        pages(tmp_path)


def test_pages_beside_the_package_are_found(tmp_path):
    """The sdist, installed as editable, lacks the link in the package, and on Windows it may be a text file."""
    commands = tmp_path / "runnerkit" / "commands"
    commands.mkdir(parents=True)
    shutil.copy(docs_pages.__file__, commands)
    (tmp_path / "docs").mkdir()
    (tmp_path / "runnerkit" / "docs").write_text("../docs")

    assert runpy.run_path(str(commands / "docs_pages.py"))["FOLDER"] == tmp_path / "docs"
    assert docs_pages.FOLDER.samefile(DOCS)


def test_the_list_has_the_form_of_llms_txt(capsys):
    """A title, a quote with the summary, and sections of links to all pages, which exist."""
    assert main(["docs", "llms.txt"]) == 0

    text = capsys.readouterr().out
    links = re.findall(r"^- \[[^\]]+\]\(docs/(\S+)\): \S.+$", text, flags=re.MULTILINE)
    assert re.match(r"# runnerkit\n\n> \S.+\n\n", text)
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == ["Guides", "Tutorial", "Reference", "Migration"]
    assert sorted(links) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert text.strip() == llms_txt().strip()
