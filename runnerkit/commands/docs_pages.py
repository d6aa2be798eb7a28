"""The pages of the documentation, which the package contains as Markdown, and ``llms.txt``, which lists them.

setup.py runs this file alone, so it imports from the package only within functions.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# In the checkout a link, which the sdist, installed as editable, and checkouts on Windows do not have.
FOLDER = _PACKAGE / "docs" if (_PACKAGE / "docs").is_dir() else _PACKAGE.parent / "docs"
INDEX = "llms.txt"
_REFERENCE = re.compile(r"^::: (\S+)$", flags=re.MULTILINE)
_NOT_PROSE = ("#", ">", "|", "!", "<", "`", "-", "*", ":::", "```")  # beginnings of paragraphs without a summary
_SECTIONS = {"": "Guides", "tutorial": "Tutorial", "reference": "Reference", "migration": "Migration"}
_ABOUT = """\
# runnerkit

> You write what happens to a batch; runnerkit runs it on any engine, with exact results and minimal overhead.

A library for training PyTorch models. Each page is a Markdown file; `runnerkit docs TOPIC` prints the one of the
installed version, and the pages of the reference with the signatures and docstrings of the package.
`runnerkit new NAME` writes a project with a config, a script and a test. Every command that prints data has the option
`--json`.
"""


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        topic: path in the folder without its suffix, such as "cli" or "reference/callbacks".
    """

    topic: str
    title: str
    summary: str
    text: str


def pages(folder: Path = FOLDER) -> list[Page]:
    """Read the pages, the start page first.

    Raises:
        FileNotFoundError: the installation lacks them.

    >>> pages()[0].topic
    'index'
    """
    paths = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.glob("**/*.md")}
    if not paths:
        raise FileNotFoundError(f"the pages of the documentation are not in {folder}: install runnerkit again")
    topics = sorted(paths, key=lambda topic: (topic != "index", topic.count("/"), topic))
    return [_page(topic, paths[topic].read_text(encoding="utf-8")) for topic in topics]


def llms_txt(folder: Path = FOLDER, *, prefix: str = "docs/") -> str:
    """Return the list of all pages, in the format of https://llmstxt.org.

    Args:
        prefix: before the paths of the pages.
    """
    lines, found = [_ABOUT], pages(folder)
    for part, heading in _SECTIONS.items():
        of_part = [page for page in found if page.topic.rpartition("/")[0] == part]
        listed = [f"- [{page.title}]({prefix}{page.topic}.md): {page.summary}" for page in of_part]
        lines += [f"## {heading}\n", *listed, ""]
    return "\n".join(lines)


def page_text(topic: str) -> str:
    """Return a page as Markdown; names of the reference are replaced by their signatures and docstrings.

    Raises:
        KeyError: `topic` is not a page.
    """
    if topic == INDEX:
        return llms_txt()
    by_topic = {page.topic: page for page in pages()}
    topic = topic.removesuffix(".md").removeprefix("docs/")
    if topic not in by_topic:
        from runnerkit.errors import UnknownKeyError

        near = get_close_matches(topic, by_topic, n=3) or list(by_topic)
        raise UnknownKeyError(f"there is no page {topic!r}; choose from {', '.join(near)}")
    return _REFERENCE.sub(lambda found: "\n".join(_described(found[1])), by_topic[topic].text)


def _page(topic: str, text: str) -> Page:
    title = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    paragraphs = (" ".join(each.split()) for each in text.split("\n\n"))
    prose = next((each for each in paragraphs if each and not each.startswith(_NOT_PROSE)), "")
    prose = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", prose)
    return Page(topic, title[1] if title else topic, re.split(r"(?<=[.!]) ", prose)[0].rstrip(":"), text)


def _described(path: str) -> Iterator[str]:
    """Yield the lines of a public name: its signature, docstring and methods."""
    module, _, name = path.rpartition(".")
    value = pkgutil.resolve_name(f"{module}:{name}")
    yield f"### {path}\n"
    if inspect.isclass(value) or callable(value):
        yield f"```python\n{name}{_signature_of(value)}\n```\n"
    yield inspect.getdoc(value) or ""
    if not inspect.isclass(value):
        return
    for method, member in vars(value).items():
        if inspect.isfunction(member) and not method.startswith("_"):
            documented = inspect.getdoc(pkgutil.resolve_name(f"{module}:{name}.{method}")) or ""
            yield f"\n- `{method}{_signature_of(member)}`: {documented.partition(chr(10))[0]}"


def _signature_of(value: object) -> str:
    try:
        return str(inspect.signature(value))  # type: ignore[arg-type]  # raises for what cannot be called
    except (TypeError, ValueError):
        return "(...)"
