"""Metrics as JSON Lines: functions to format and to read one line per position in a run.

NaN and infinities are strings, see :mod:`runnerkit.support.strict_json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from runnerkit.logger import Scope, Step
from runnerkit.support.strict_json import strict_number

FILE = "metrics.jsonl"  # in the logdir


Line = tuple[Scope, Step, dict[str, float]]


def format_line(scope: Scope, step: Step, metrics: Mapping[str, float]) -> bytes:
    """Format the metrics of one position in a run.

    >>> format_line("loader", Step("train", "valid", 1, 10), {"loss": float("inf")})[-33:]
    b'"metrics": {"loss": "Infinity"}}\\n'
    """
    place = {"stage": step.stage, "loader": step.loader, "epoch": step.epoch, "step": step.batch}
    entry = {"scope": scope, **place, "metrics": {name: strict_number(float(value)) for name, value in metrics.items()}}
    return json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read_lines(path: Path) -> Iterator[tuple[Line, int]]:
    """Yield each line and its end offset in bytes; stop at the first line that is incomplete or invalid.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / FILE
    >>> line = format_line("loader", Step("train", "valid", 1, 10), {"loss": float("inf")})
    >>> path.write_bytes(line + line.rstrip())
    227
    >>> list(read_lines(path))
    [(('loader', Step(stage='train', loader='valid', epoch=1, batch=10), {'loss': inf}), 114)]
    """
    end = 0
    with path.open("rb") as file:
        for text in file:
            line = _parsed(text)
            if line is None:
                return
            end += len(text)
            yield line, end


def _parsed(text: bytes) -> Line | None:
    if not text.endswith(b"\n"):
        return None
    try:
        entry = json.loads(text)
        step = Step(entry["stage"], entry["loader"], int(entry["epoch"]), int(entry["step"]))
        return entry["scope"], step, {name: float(value) for name, value in entry["metrics"].items()}
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
