"""A hook of mkdocs: the site has the pages of docs/ only, so a link to another file becomes that file's path."""

from __future__ import annotations

import re
from pathlib import Path

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown, *, page, config, **_):
    """Make ``[text](../tests/x.py)`` into ``text (`tests/x.py`)``, or the path alone if the text is the file's name."""
    docs = Path(config.docs_dir).resolve()

    def replaced(link):
        text, target = link[1], (docs / page.file.src_uri).parent.joinpath(link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        path = f"`{target.relative_to(docs.parent)}`"
        return path if Path(text.strip("`")).stem == target.stem else f"{text} ({path})"

    return LINK.sub(replaced, markdown)
