"""``index.json``: the checkpoints of a folder that are in use, oldest first; it can name no files elsewhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runnerkit.version import __version__

FORMAT_VERSION = 1


@dataclass
class Record:
    """One checkpoint of a folder: its file, content and score."""

    name: str
    kind: str  # "runner": all state; "model": a plain state_dict
    epoch: int
    batch: int
    size_bytes: int
    sha256: str
    score: float | None = None
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    stage: str | None = None  # None: written by a version without it
    judged_by: dict[str, Any] | None = None  # the source of the score: loader, metric, minimize


class DamagedIndex(ValueError):
    """Error for an index that is truncated or otherwise invalid."""


def to_json(records: Sequence[Record]) -> str:
    """Serialize records.

    >>> to_json([])
    '{\\n "format_version": 1,\\n "checkpoints": []\\n}'
    """
    checkpoints = [asdict(record) for record in records]
    return json.dumps({"format_version": FORMAT_VERSION, "checkpoints": checkpoints}, indent=1)


def read_index(path: Path) -> list[Record]:
    """Read records.

    Raises:
        FileNotFoundError: there is no index.
        DamagedIndex: it is truncated, or names something other than a checkpoint of its folder.
        ValueError: a newer runnerkit wrote it.
    """
    content = path.read_bytes()
    try:
        index = json.loads(content)
        is_newer = index["format_version"] > FORMAT_VERSION
        records = [] if is_newer else [_record(**each) for each in index["checkpoints"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedIndex(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if is_newer:
        raise ValueError(f"{path} was written by a newer runnerkit than this, {__version__}: upgrade it")
    return records


def _record(**fields: Any) -> Record:
    record = Record(**fields)
    if not isinstance(record.name, str) or not re.fullmatch(r"\w[\w.-]*", record.name):
        raise ValueError(f"not a checkpoint's name: {record.name!r}")
    if record.kind not in ("runner", "model"):
        raise ValueError(f"kind {record.kind!r} of {record.name}")
    for name, value in (("epoch", record.epoch), ("batch", record.batch), ("size_bytes", record.size_bytes)):
        if not isinstance(value, int):
            raise TypeError(f"{name} of {record.name} is not an integer")
    if record.stage is not None and not isinstance(record.stage, str):
        raise TypeError(f"stage of {record.name} is not a name")
    if record.judged_by is not None and set(record.judged_by) != {"loader", "metric", "minimize"}:
        raise ValueError(f"judged_by {record.judged_by!r} of {record.name}")
    if record.score is not None and not isinstance(record.score, int | float):
        raise TypeError(f"score of {record.name} is not a number")
    return record


def name_at(epoch: int, step: float) -> str:
    """Return the name of a checkpoint, without the ending of its file.

    >>> name_at(3, 120), name_at(3, math.inf)
    ('model.0003.00000120', 'model.0003')
    """
    return f"model.{epoch:04d}" if step == math.inf else f"model.{epoch:04d}.{step:08d}"


def place_of(name: str) -> tuple[int, float] | None:
    """Return (epoch, step within it; infinite at its end) for a checkpoint's name; None for any other name.

    >>> place_of("model.0003.00000120.pth"), place_of("model.0003"), place_of("best.pth")
    ((3, 120), (3, inf), None)
    """
    match = re.fullmatch(r"model\.(\d{4,})(?:\.(\d{8,}))?(?:\.pth)?", name)
    return (int(match[1]), int(match[2]) if match[2] else math.inf) if match else None
