"""MkDocs hook: the site contains only the pages of docs/, so links to other files become paths."""

from __future__ import annotations

import re
from pathlib import Path

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown, *, page, config, **_):
    """Turn ``[text](../tests/x.py)`` into ``text (`tests/x.py`)``, or into the path if the text is the file's name."""
    docs = Path(config.docs_dir).resolve()

    def replaced(link):
        text, target = link[1], (docs / page.file.src_uri).parent.joinpath(link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        path = f"`{target.relative_to(docs.parent)}`"
        return path if Path(text.strip("`")).stem == target.stem else f"{text} ({path})"

    return LINK.sub(replaced, markdown)
