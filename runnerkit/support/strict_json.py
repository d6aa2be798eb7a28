"""Strict JSON, which does not support NaN and infinities.

They are written as the strings "NaN", "Infinity" and "-Infinity", as in the JSON format of Protocol Buffers
(https://protobuf.dev/programming-guides/json). Python's ``float`` and JavaScript's ``Number`` parse them.
"""

from __future__ import annotations

import json
import math
from typing import Any

from runnerkit.support.plain_values import plain


def strict_number(value: float) -> float | str:
    """Return a number, or its name if it is not finite.

    >>> strict_number(-math.inf)
    '-Infinity'
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def strict_json(value: Any, *, indent: int | None = 2, ensure_ascii: bool = False) -> str:
    """Format a value as strict JSON; objects that are not plain become strings.

    >>> strict_json({"loss": math.nan, "epochs": (1, 2)}, indent=None)
    '{"loss": "NaN", "epochs": [1, 2]}'
    """
    return json.dumps(_strict(plain(value)), ensure_ascii=ensure_ascii, allow_nan=False, indent=indent)


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return strict_number(value)
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # a file's name may contain what UTF-8 cannot hold
    if isinstance(value, dict):
        return {_strict(key): _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list) else value
