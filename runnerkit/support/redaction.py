"""Removal of credentials from what a run writes: hyperparameters, the command, the report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
_NAME = re.compile(
    r"(^|_)(api_?key|(access|account|auth|encryption|license|private|secret|ssh)_?key(_id)?"
    r"|passw(or)?d|passphrase|secret|credentials?)$"
    # Not pad_token or mask_token, which are hyperparameters.
    r"|^token$|(^|_)(access|api|auth|bearer|git(hub|lab)|hf|hub|id|refresh|secret|security|session|wandb)_?token$"
)
_TEXT = re.compile(
    r"(?<=://)[^/\s@]*:[^/\s@]+(?=@)"  # user and password of a URL
    r"|\b(hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]+\.eyJ[\w-]+\.[\w-]+)"
)
_FROM_ENVIRONMENT = "${oc.env:"


def redacted(value: Any) -> Any:
    """Copy nested dicts and lists; values of names such as ``api_key`` and tokens in strings become "***".

    >>> redacted({"lr": 0.1, "service": {"api_key": "abc", "url": "https://me:abc@host/x"}, "pad_token": "[PAD]"})
    {'lr': 0.1, 'service': {'api_key': '***', 'url': 'https://***@host/x'}, 'pad_token': '[PAD]'}
    """
    if isinstance(value, Mapping):
        return {key: _redacted_at(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(each) for each in value]
    return _TEXT.sub(HIDDEN, value) if isinstance(value, str) else value


def redacted_command(words: Iterable[str]) -> list[str]:
    """Copy a command line; values of options and overrides such as ``--api-key`` become "***".

    >>> redacted_command(["train.py", "--lr=0.1", "--api-key", "abc", "--password=abc", "logger.token=abc"])
    ['train.py', '--lr=0.1', '--api-key', '***', '--password=***', 'logger.token=***']
    """
    copy, option = list[str](), ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and _is_credential(name):
            copy.append(f"{name}={_redacted_at(name, value)}")
        else:
            copy.append(_redacted_at(option, word) if not word.startswith("-") else redacted(word))
        option = word if word.startswith("-") and not equals else ""
    return copy


def _redacted_at(name: str, value: Any) -> Any:
    is_safe = value is None or isinstance(value, bool) or (isinstance(value, str) and _FROM_ENVIRONMENT in value)
    return HIDDEN if _is_credential(name) and not is_safe else redacted(value)


def _is_credential(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").strip("_")
    return _NAME.search(re.split(r"[./]", words)[-1]) is not None
