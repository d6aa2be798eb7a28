"""Every Python block of the README and the docs runs as it stands there."""

import re
from pathlib import Path

import pytest

from runnerkit.torchvision_cpu import import_torchvision

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In order, in one namespace for each page, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    if "import torchmetrics" in page.read_text() or "from torchmetrics" in page.read_text():
        import_torchvision()  # torchmetrics imports it, and it may need the cure

    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands_exist(page):
    """A relative link has its target, `make X` its rule, `python examples/X.py` its file."""
    text = page.read_text(encoding="utf-8")
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [target for target in targets if not (page.parent / target).exists()] == []
    commands = "\n".join(blocks(page, "bash") + blocks(page, "sh") + re.findall(r"`(make [a-z-]+)`", text))
    assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= rules
    assert [path for path in re.findall(r"(?<!tests/)\bexamples/[\w/]+\.py", text) if not (ROOT / path).exists()] == []
