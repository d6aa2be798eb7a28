"""MkDocs hook: links to files outside of docs/ lead to the pages of examples, to the repository, or become paths."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

GALLERY, LISTS = "examples/index.md", ("examples/first_hour/README.md", "examples/minimal/README.md")
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown, *, page, config, files):
    """Turn ``[text](../tests/x.py)`` into a link, ``text (`tests/x.py`)``, or the path if it has the same name."""
    docs = Path(config.docs_dir).resolve()

    def replaced(link):
        text, target = link[1], (docs / page.file.src_uri).parent.joinpath(link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        path = target.relative_to(docs.parent)
        if files.get_file_from_path(own := page_of(path)):
            return f"[{text}]({posixpath.relpath(own, posixpath.dirname(page.file.src_uri))})"
        if config.repo_url:
            kind, heading = "tree" if target.is_dir() else "blob", link[3] or ""
            return f"[{text}]({config.repo_url}/{kind}/HEAD/{path}{heading})"
        return f"`{path}`" if Path(text.strip("`")).stem == target.stem else f"{text} (`{path}`)"

    return LINK.sub(replaced, markdown)


def page_of(path: Path) -> str:
    """Return the page that an example has on the site; the gallery takes the place of the lists of small ones."""
    return GALLERY if path.as_posix() in LISTS else path.with_suffix(".md").as_posix()
