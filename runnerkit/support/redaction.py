"""Removal of credentials from what a run writes: hyperparameters, the command, the report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from runnerkit.support.members import field_values
from runnerkit.support.plain_values import is_named_tuple

HIDDEN = "***"
# Patterns are compiled when first used.
_NAME = (
    r"passw(or)?ds?\d*$|(^|_)passcode$|(^|_)((admin|auth|db|login|root|smtp)_?pass|pwd|passphrases?)$"
    r"|(^|_)(authorization|cookie|credentials?|secrets?|amz_signature)$"
    r"|(^|_)(access|account|api|app|auth|encryption|license|master|private|secret|signing|sse_?customer|ssh|subscription)_?keys?(_id)?$"
    r"|(^|_)(anthropic|aws|azure|clearml|comet|hf|huggingface|mlflow|neptune|openai|slack|wandb)_?keys?$"
    # Not pad_token, max_token or mask_token, which are hyperparameters.
    r"|^token$|(^|_)(access|api|auth|bearer|bot|csrf|discord|git(hub|lab)|hf|hub|huggingface|id|jwt|oauth|personal"
    r"|refresh|sas|secret|security|session|slack|telegram|user|wandb)_?token$|(^|_)(access|api|auth|bearer|refresh)_?tokens$"
)
_TEXT = (
    # User and password of a URL, of which a Path has one slash. The password may have slashes, but is not a port.
    r"(?:(?<=://)|(?<=\w:/)(?!/))(?!arn:)[^/\s@:\[]*:(?:[^/\s]+|(?!\d+/)[^\s@]+)(?=@)"
    r"|\b(hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|sk-[\w-]{20,}"
    r"|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|xox[abprs]-[\w-]{10,}"
    r"|(?<=[?& -]signature=)[\w%+/=.~-]{16,}|(?<=[?&]sig=)[\w%+/=.~-]{16,}"  # of a signed URL or request
    r"|(?<=\bbearer )(?=\S*\d)[\w.~+/-]{16,}=*"
    r"|eyJ[\w-]+\.eyJ[\w-]+\.[\w-]+|(?<=hooks\.slack\.com/services/)[\w/]+)"
)
# A name within a text, before its value: of JSON, a header, a URL's query, an option, the environment. In prose, words
# stand before a name.
_NAME_IN_TEXT = (
    r"""(?:^|(?<=["'?&{,;(\[])|(?<=--)|(?<=[,{] )|(?<= )(?=(?-i:[A-Z][A-Z0-9_]*=)))([\w-]+)"""
    r"""\\*["']?\s*[:=](?!//)\s*(?:(?:apikey|basic|bearer|digest|token)\s+)?"""
)
_VALUE_IN_TEXT = r"""(?!\$\{oc\.env:)(?:"[^"]+"|'[^']+'|\\*["']?[^\s"'&,;{}\\]+)"""
_FROM_ENVIRONMENT = "${oc.env:"
_DEEPEST = 50  # levels of nested containers


def redacted(value: Any, _depth: int = 0) -> Any:
    """Copy nested dicts and lists; values of names such as ``api_key`` and tokens in strings become "***".

    Namespaces, dataclasses and named tuples become dicts.

    >>> redacted({"lr": 0.1, "service": {"api_key": "abc", "url": "https://me:abc@host/x"}, "pad_token": "[PAD]"})
    {'lr': 0.1, 'service': {'api_key': '***', 'url': 'https://***@host/x'}, 'pad_token': '[PAD]'}
    """
    if isinstance(value, str):
        return _redacted_text(value)
    parts = _fields_of(value)
    if parts is None and not isinstance(value, list | tuple):
        return value
    if _depth == _DEEPEST:  # it may contain itself
        return HIDDEN
    if parts is None:
        return [redacted(each, _depth + 1) for each in value]
    return {key: _redacted_at(str(key), each, _depth + 1) for key, each in parts.items()}


def _fields_of(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, SimpleNamespace) or type(value).__name__ == "Namespace":  # argparse's, which loads slowly
        return dict(vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        return dict.fromkeys((each.name for each in fields(value)), None) | dict(field_values(value))
    if not is_named_tuple(value):
        return None
    named: Any = value
    return dict(zip(named._fields, named, strict=False))


def redacted_command(words: Iterable[str]) -> list[str]:
    """Copy a command line; values of options and overrides such as ``--api-key`` become "***".

    >>> redacted_command(["train.py", "--lr=0.1", "--api-key", "abc", "--password=abc", "logger.token=abc"])
    ['train.py', '--lr=0.1', '--api-key', '***', '--password=***', 'logger.token=***']
    """
    copy, option = list[str](), ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and is_credential(name):
            copy.append(f"{name}={_redacted_at(name, value)}")
        else:
            copy.append(_redacted_at(option, word) if not word.startswith("--") else redacted(word))
        is_value = word.startswith("-") and not word.startswith("--") and is_credential(option)
        option = word if word.startswith("-") and not equals and not is_value else ""
    return copy


def _redacted_at(name: str, value: Any, depth: int = 0) -> Any:
    is_safe = value is None or isinstance(value, bool) or (isinstance(value, str) and _FROM_ENVIRONMENT in value)
    return HIDDEN if is_credential(name) and not is_safe else redacted(value, depth)


def _redacted_text(text: str) -> str:
    text = re.sub(_TEXT, HIDDEN, text, flags=re.IGNORECASE)
    parts, place = list[str](), 0
    for named in re.finditer(_NAME_IN_TEXT, text, flags=re.IGNORECASE):
        if named.start() < place or not is_credential(named[1]):
            continue
        if (found := re.compile(_VALUE_IN_TEXT).match(text, named.end())) is None:
            continue
        value = found[0]
        quote = value[: len(value) - len(value.lstrip("\\'\""))]
        parts += [text[place : named.end()], quote, HIDDEN, value[-1] if value[-1] in quote else ""]
        place = found.end()
    return "".join([*parts, text[place:]])


def is_credential(name: str) -> bool:
    """Return whether what has this name is hidden."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").strip("_")
    return re.search(_NAME, re.split(r"[./]", words)[-1]) is not None
