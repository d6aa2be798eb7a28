"""Griffe extension that converts docstrings for the site: examples become code blocks, and roles become links."""

from __future__ import annotations

import ast
import re

import griffe

from runnerkit.support.stub_names import imports_of_stub

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", flags=re.MULTILINE)
SECTION = re.compile(r"\n(Args|Attributes|Raises|Returns):\n")
SEVERAL = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {5,}.*)*)", flags=re.MULTILINE)
ATTRIBUTES = re.compile(r"^Attributes:\n(?: {4}.*\n?)*", flags=re.MULTILINE)
ENTRY = re.compile(r"^    (\w+):", flags=re.MULTILINE)
CLASS = re.compile(r":class:`(?:~([\w.]+)\.)?(\w+)`")
OTHER = re.compile(r":(?:class|meth|func):`(?:[~.][\w.]*\.)?([^`]+)`")
FACADES = ("runnerkit.contrib", "runnerkit.metrics")


class DocstringsAsMarkdown(griffe.Extension):
    """Converter to Markdown, so that docstrings in the sources stay plain text for terminals and editors."""

    def __init__(self):
        self._types = {}

    def on_class_members(self, *, node, cls, **_):
        if isinstance(node, ast.AST):
            self._types[cls.path] = types_of(node)

    def on_object(self, *, obj, **_):
        if obj.docstring is not None:
            text = EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", obj.docstring.value)
            text = SECTION.sub(r"\n\n\1:\n", text)  # griffe requires an empty line before each section
            text = SEVERAL.sub(one_per_row, text)
            types = {**dict.fromkeys(obj.members), **self._types.get(obj.path, {})}
            text = ATTRIBUTES.sub(lambda section: with_types(section[0], types), text)
            text = text.replace(": >=", ": \\>=")  # avoids a block quote
            obj.docstring.value = with_links(text, ".".join(obj.path.split(".")[:2]))

    def on_package(self, *, pkg, **_):
        # griffe drops the wildcard imports of dl.pyi when it merges the stub into dl.py.
        for name, module in imports_of_stub("runnerkit.dl"):
            pkg["dl"].set_member(name, griffe.Alias(name, f"{module}.{name}"))


def with_links(text: str, package: str) -> str:
    """Turn roles into links to the page of a class, and into code if the site lacks the page.

    Args:
        text: a docstring; ``:class:`~runnerkit.metrics.X``` is in that package.
        package: that of the docstring, which is also that of ``:class:`X```; all but two are in ``dl``.
    """

    def linked(role):
        found = role[1] or package
        return f"[`{role[2]}`][{found if found in FACADES else 'runnerkit.dl'}.{role[2]}]"

    return OTHER.sub(r"`\1`", CLASS.sub(linked, text))


def one_per_row(entry: re.Match[str]) -> str:
    """Give each of several names, "prefix, suffix: around the name", the entry's text; griffe reads one name."""
    return "\n".join(f"    {name}: {entry[2]}" for name in entry[1].split(", "))


def with_types(section: str, types: dict[str, str | None]) -> str:
    """Write the types of attributes behind their names: for one it does not know, griffe takes that of the one before.

    Args:
        section: the section "Attributes" of a docstring.
        types: by name; None is one that griffe finds itself.
    """

    def typed(entry):
        found = types.get(entry[1], "")
        return entry[0] if found is None else f"    {entry[1]} ({found}):"

    return ENTRY.sub(typed, section)


def types_of(tree: ast.AST) -> dict[str, str]:
    """Return the types of a class's attributes, also of those that methods set: their annotations, or a constant's."""
    types: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            targets, found = [node.target], ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is not None:
            targets, found = node.targets, type(node.value.value).__name__
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Attribute) or (isinstance(target, ast.Name) and node in tree.body):
                types.setdefault(target.attr if isinstance(target, ast.Attribute) else target.id, found)
    return types
