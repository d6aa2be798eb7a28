"""Griffe extension that writes type aliases out: readers see ``Literal["min", "max"]`` in place of ``Mode``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import griffe

TYPES = (griffe.ExprSubscript, griffe.ExprBinOp, griffe.ExprName, griffe.ExprAttribute)

ATTRIBUTE = re.compile(r"^    \w+ \(.+\):", flags=re.MULTILINE)
WORD = re.compile(r"\b[A-Z]\w*\b(?!\[)")


class TypeAliases(griffe.Extension):
    """Replacer of the aliases in the annotations of a package."""

    def __init__(self):
        self._aliases = {}

    def on_package(self, *, pkg, **_):
        self._aliases = aliases_of(pkg)

    def on_function(self, *, func, **_):
        func.returns = written_out(func.returns, self._aliases)
        for parameter in func.parameters:
            parameter.annotation = written_out(parameter.annotation, self._aliases)

    def on_attribute(self, *, attr, **_):
        attr.annotation = written_out(attr.annotation, self._aliases)

    def on_class(self, *, cls, **_):
        if cls.docstring is not None:  # the extension before has put the types of attributes into it
            cls.docstring.value = in_docstring(cls, self._aliases)


def objects_of(parent) -> Iterator[griffe.Object]:
    """Yield what a module or class defines, at any depth."""
    for each in parent.members.values():
        if not each.is_alias:
            yield each
            yield from objects_of(each)


def aliases_of(pkg) -> dict[str, griffe.Expr]:
    """Return the values of type aliases by path: those names in CamelCase of modules whose values are types."""
    variables = [each for each in objects_of(pkg) if each.is_attribute and each.parent.is_module]
    return {
        each.path: each.value
        for each in variables
        if each.name[0].isupper() and not each.name.isupper() and isinstance(each.value, TYPES)
    }


def written_out(part: Any, aliases: dict[str, griffe.Expr], argument: griffe.Expr | None = None) -> Any:
    """Return an annotation without aliases; `argument` is what T stands for within the value of an alias."""
    if isinstance(part, list):
        return [written_out(each, aliases, argument) for each in part]
    if not isinstance(part, griffe.Expr):
        return part
    if isinstance(part, griffe.ExprSubscript) and part.left.canonical_path in aliases:
        return written_out(aliases[part.left.canonical_path], aliases, written_out(part.slice, aliases, argument))
    if isinstance(part, griffe.ExprName | griffe.ExprAttribute):
        if part.canonical_path in aliases:
            return written_out(aliases[part.canonical_path], aliases)
        return argument if argument is not None and part.canonical_name == "T" else part
    names = [field.name for field in dataclasses.fields(part)]
    return dataclasses.replace(part, **{name: written_out(getattr(part, name), aliases, argument) for name in names})


def in_docstring(each: griffe.Class, aliases: dict[str, griffe.Expr]) -> str:
    """Return a docstring without aliases in the types of attributes, such as "    batch (Batch): ..."."""

    def named(word):
        try:
            path = each.resolve(word[0])
        except griffe.NameResolutionError:
            return word[0]
        return str(written_out(aliases[path], aliases)) if path in aliases else word[0]

    return ATTRIBUTE.sub(lambda entry: WORD.sub(named, entry[0]), each.docstring.value)
