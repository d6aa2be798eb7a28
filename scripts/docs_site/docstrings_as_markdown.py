"""Griffe extension that converts docstrings for the site: examples become code blocks, and roles become links."""

from __future__ import annotations

import re

import griffe

from runnerkit.support.stub_names import imports_of_stub

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", flags=re.MULTILINE)
SECTION = re.compile(r"\n(Args|Attributes|Raises|Returns):\n")
SEVERAL = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {5,}.*)*)", flags=re.MULTILINE)
CLASS = re.compile(r":class:`(\w+)`")
OTHER = re.compile(r":(?:class|meth|func):`([^`]+)`")


class DocstringsAsMarkdown(griffe.Extension):
    """Converter to Markdown, so that docstrings in the sources stay plain text for terminals and editors."""

    def on_object(self, *, obj, **_):
        if obj.docstring is not None:
            text = EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", obj.docstring.value)
            text = SECTION.sub(r"\n\n\1:\n", text)  # griffe requires an empty line before each section
            text = SEVERAL.sub(one_per_row, text)
            text = text.replace(": >=", ": \\>=")  # avoids a block quote
            package = ".".join(obj.path.split(".")[:2])
            facade = package if package in ("runnerkit.contrib", "runnerkit.metrics") else "runnerkit.dl"
            obj.docstring.value = OTHER.sub(r"`\1`", CLASS.sub(rf"[`\1`][{facade}.\1]", text))

    def on_package(self, *, pkg, **_):
        # griffe drops the wildcard imports of dl.pyi when it merges the stub into dl.py.
        for name, module in imports_of_stub("runnerkit.dl"):
            pkg["dl"].set_member(name, griffe.Alias(name, f"{module}.{name}"))


def one_per_row(entry: re.Match[str]) -> str:
    """Give each of several names, "prefix, suffix: around the name", the entry's text; griffe reads one name."""
    return "\n".join(f"    {name}: {entry[2]}" for name in entry[1].split(", "))
