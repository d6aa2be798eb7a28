"""An extension of griffe, which reads docstrings for the site: examples become blocks of code, roles become links."""

from __future__ import annotations

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", flags=re.MULTILINE)
SECTION = re.compile(r"\n(Args|Attributes|Raises|Returns):\n")
CLASS = re.compile(r":class:`(\w+)`")
OTHER = re.compile(r":(?:class|meth|func):`([^`]+)`")


class DocstringsAsMarkdown(griffe.Extension):
    """Leaves the docstrings in the sources plain text, for terminals and editors."""

    def on_object(self, *, obj, **_):
        if obj.docstring is not None:
            text = EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", obj.docstring.value)
            text = SECTION.sub(r"\n\n\1:\n", text)  # griffe wants an empty line before each
            text = text.replace(": >=", ": \\>=")  # no quotation
            facade = "runnerkit.contrib" if obj.path.startswith("runnerkit.contrib.") else "runnerkit.dl"
            obj.docstring.value = OTHER.sub(r"`\1`", CLASS.sub(rf"[`\1`][{facade}.\1]", text))
