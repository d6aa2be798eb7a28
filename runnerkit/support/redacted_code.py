"""Removal of credentials from source code, in which names and values have many forms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from runnerkit.support.redaction import HIDDEN, is_credential, redacted

_LONGEST_LINE = 1_000  # characters; longer lines are data, over which patterns would take long
# Patterns are compiled when first used. No name is looked for within a name, which would take quadratic time.
# The mark of a diff, an indentation, the head of a hunk (git repeats a line of the file there), words before a name.
_BEGINNING = r"(?:[-+ \t]|@@+ [^@]* @@+ |(?:export|declare|readonly|local|set|setx|ENV|ARG|const|let|var|val)[ \t]+)*"
# A name, what may stand between it and its value (a bracket, a type, a prefix), and a quoted value.
_QUOTED = (
    r"""(?<![\w-])([\w-]+)(["']?\]?(?:\s*:[^="']{1,60})?\s*(?::=|!=|={1,3}>?|:)\s*[bBfFrRuU]{0,2})"""
    r"""(["']{3}|["'])((?:\\.|(?!\3).)+)(\3|$)"""
)
_WHOLE = r"([\w-]+)(:\s+)(.+)"  # a line of YAML, whose value may have several words
_ARGUMENT = (  # the second of a call that sets a variable of the environment
    r"""(\w*(?:setdefault|setenv|putenv)\(\s*["']([\w-]+)["']\s*,\s*[bBfFrRuU]{0,2})(["'])((?:\\.|(?!\3).)+)(\3|$)"""
)
_OPTION = r"(?<![\w-])(-{1,2}[A-Za-z][\w-]*)([ \t]+)(?!-)(\S+)"  # of a command in a shell script
# A name whose value is on the next line.
_OPEN = r"""(?:^["']?([\w-]+)["']?:\s*(?:[|>][-+]?)?|(?<![\w-])([\w-]+)\s*=\s*(?:\(|\\|[bBfFrRuU]{0,2}["']{3}))$"""
_LONG_WORD = r"[A-Za-z0-9_-]{32,}"
_ENCODED = r"(?=.*\d)[A-Za-z0-9+/]{40,}={0,2}$"  # a line of a key


def redacted_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a diff, or of a file; values of names like ``api_key``, keys and tokens become "***".

    >>> print(*redacted_lines(["+export HF_TOKEN=abc", '+self.api_key: str = "abc"', "+lr = 0.1"]), sep="\\n")
    +export HF_TOKEN=***
    +self.api_key: str = "***"
    +lr = 0.1
    """
    is_value = is_key = False  # is the line the value of a name before it, or within a private key?
    for whole in lines:
        line, rest = whole[:_LONGEST_LINE], len(whole) - _LONGEST_LINE
        found = re.match(_BEGINNING, line)
        beginning = found[0] if found is not None else ""
        text = line[len(beginning) :].rstrip()
        if "-----BEGIN" in line and "PRIVATE" in line:
            is_key = True
        if text and (is_value or is_key or re.match(_ENCODED, text)):
            yield beginning + HIDDEN
        else:
            yield _redacted(line, beginning) + (f" ... {rest:,} more characters" if rest > 0 else "")
        is_key = is_key and "-----END" not in line
        opened = re.search(_OPEN, text)
        is_value = opened is not None and is_credential(opened[1] or opened[2])


def _redacted(line: str, beginning: str) -> str:
    line = re.sub(_OPTION, _hidden_option, line)
    text = re.sub(_ARGUMENT, _hidden_argument, re.sub(_QUOTED, _hidden_text, line[len(beginning) :]))
    if whole := re.fullmatch(_WHOLE, text):
        text = f"{whole[1]}{whole[2]}{_hidden(whole[1], whole[3])}"
    return beginning + str(redacted(text))  # a name at the start of a text is recognized


def _hidden_text(found: re.Match[str]) -> str:
    name, between, quote, value, end = found.groups()
    is_long_key = name.lower() == "key" and re.fullmatch(_LONG_WORD, value) is not None
    return f"{name}{between}{quote}{HIDDEN if is_long_key else _hidden(name, value)}{end}"


def _hidden_argument(found: re.Match[str]) -> str:
    before, name, quote, value, end = found.groups()
    return f"{before}{quote}{_hidden(name, value)}{end}"


def _hidden_option(found: re.Match[str]) -> str:
    name, space, value = found.groups()
    return f"{name}{space}{_hidden(name.lstrip('-'), value)}"


def _hidden(name: str, value: str) -> str:
    return str(redacted({name: value})[name]) if is_credential(name) else value
