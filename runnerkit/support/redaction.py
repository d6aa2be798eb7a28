"""Removal of credentials from what a run writes: hyperparameters, the command, the report."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

HIDDEN = "***"
_NAME = re.compile(
    r"(^|_)(api_?keys?|(access|account|auth|encryption|license|private|secret|ssh)_?keys?(_id)?"
    r"|(anthropic|aws|azure|clearml|comet|hf|huggingface|mlflow|neptune|openai|service|slack|user|wandb)_?keys?"
    r"|passw(or)?ds?|pwd|passphrases?|(admin|auth|db|login|root|smtp|user)_?pass|authorization|secrets?|credentials?)$"
    r"|(^|_)(access|api|auth|bearer|id|refresh|secret|session)_?tokens$"
)
# A hyperparameter, not a credential, if this stands before "_token".
_MARKER = re.compile(
    r"(^|_)(bos|cls|control|decoder|end|eos|fake|first|image|last|mask|new|pad|padding|prompt|sep|special|start|stop"
    r"|target|text|time|unk|word)_token$"
)
_TEXT = re.compile(
    r"(?<=://)[^/\s@]*:[^/\s@]+(?=@)"  # user and password of a URL
    r"|\b(hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]+\.eyJ[\w-]+\.[\w-]+)"
)
# A name and its value within a text: of JSON, of a header, of a URL's query.
_PAIR = re.compile(r"""([\w-]+)(["']?\s*[:=](?!//)\s*(?:(?:basic|bearer)\s+)?["']?)([^\s"'&,;{}]+)""", re.IGNORECASE)
_FROM_ENVIRONMENT = "${oc.env:"


def redacted(value: Any) -> Any:
    """Copy nested dicts and lists; values of names such as ``api_key`` and tokens in strings become "***".

    Namespaces and dataclasses become dicts.

    >>> redacted({"lr": 0.1, "service": {"api_key": "abc", "url": "https://me:abc@host/x"}, "pad_token": "[PAD]"})
    {'lr': 0.1, 'service': {'api_key': '***', 'url': 'https://***@host/x'}, 'pad_token': '[PAD]'}
    """
    if isinstance(value, Mapping):
        return {key: _redacted_at(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(each) for each in value]
    if isinstance(value, Namespace | SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        return redacted(vars(value))
    return _redacted_text(value) if isinstance(value, str) else value


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
            copy.append(_redacted_at(option, word) if not word.startswith("--") else redacted(word))
        is_value = word.startswith("-") and not word.startswith("--") and _is_credential(option)
        option = word if word.startswith("-") and not equals and not is_value else ""
    return copy


def _redacted_at(name: str, value: Any) -> Any:
    is_safe = value is None or isinstance(value, bool) or (isinstance(value, str) and _FROM_ENVIRONMENT in value)
    return HIDDEN if _is_credential(name) and not is_safe else redacted(value)


def _redacted_text(text: str) -> str:
    def hide(pair: re.Match[str]) -> str:
        name, between, _ = pair.groups()
        return f"{name}{between}{HIDDEN}" if _is_credential(name) else pair[0]

    text = _TEXT.sub(HIDDEN, text)
    return text if _FROM_ENVIRONMENT in text else _PAIR.sub(hide, text)


def _is_credential(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").strip("_")
    last = re.split(r"[./]", words)[-1]
    is_token = re.search(r"(^|_)token$", last) is not None and _MARKER.search(last) is None
    return is_token or _NAME.search(last) is not None
