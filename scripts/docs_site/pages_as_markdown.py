"""MkDocs hook: the site also contains its pages as Markdown, and llms.txt, which lists them."""

from __future__ import annotations

import shutil
from pathlib import Path

from runnerkit.commands.docs_pages import INDEX, llms_txt


def on_post_build(*, config, **_):
    """Copy each page beside its HTML, and write the list."""
    docs, site = Path(config.docs_dir), Path(config.site_dir)
    for page in docs.rglob("*.md"):
        target = site / page.relative_to(docs)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)
    (site / INDEX).write_text(llms_txt(docs, prefix=""), encoding="utf-8")
