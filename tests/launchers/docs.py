"""The launch commands in the docs, so that exactly the documented commands are tested."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "launchers.md"


def commands(heading, page=PAGE):
    """Return the shell blocks below a heading of the page."""
    return _blocks(page)[heading]


def outputs(heading, page=PAGE):
    """Return the documented output of the commands below a heading, and other blocks of plain text."""
    return _blocks(page, "text")[heading]


def manifests(heading, page=PAGE):
    """Return the YAML files below a heading of the page."""
    return _blocks(page, "yaml")[heading]


def scripts(heading, page=PAGE):
    """Return the complete scripts below a heading of the page, which must be separate files."""
    return _blocks(page, "py")[heading]


def _blocks(page, language="bash"):
    sections = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {
        heading: re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        for heading, text in zip(sections[::2], sections[1::2], strict=True)
    }
    return {heading: blocks for heading, blocks in found.items() if blocks}
