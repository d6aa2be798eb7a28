"""Choice of the best checkpoint: records are compared by one monitor only."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, replace

from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.checkpoints.index import Record, place_of
from runnerkit.monitor import Monitor

logger = logging.getLogger(__name__)


def judge_of(records: Iterable[Record]) -> Monitor | None:
    """Return the monitor that judged the last of the records that have a score."""
    judges = [each.judged_by for each in records if each.score is not None and each.judged_by is not None]
    return Monitor(**judges[-1]) if judges else None


def best_first(records: Iterable[Record], judge: Monitor) -> list[Record]:
    """Sort the records that `judge` has judged, best first."""
    known = [each for each in records if each.score is not None and not math.isnan(each.score)]
    judged = [each for each in known if _has_judged(judge, each)]
    return sorted(judged, key=lambda each: each.score or 0.0, reverse=not judge.minimize)


def judge_again(folder: CheckpointFolder, judge: Monitor) -> None:
    """Give the checkpoints of a run that another monitor selected the scores of this one, from their metrics.

    A checkpoint without it loses its score and cannot be the best.
    """
    if all(_has_judged(judge, each) for each in folder.records):
        return
    before = judge_of(folder.records)
    judged = [each if _has_judged(judge, each) else _judged(judge, each) for each in folder.records]
    folder.replace(judged)
    if before is None:
        return
    without = [each.name for each in judged if each.score is None]
    logger.warning(
        "the best checkpoint was selected by %s, and is now by %s: earlier checkpoints are compared by that%s",
        before, judge, f", except {', '.join(without)}, which were saved without it" if without else "",
    )  # fmt: skip


def _has_judged(judge: Monitor, record: Record) -> bool:
    if record.judged_by is None:
        return record.score is not None  # an earlier version did not say by what
    return record.judged_by == asdict(judge)


def _judged(judge: Monitor, record: Record) -> Record:
    # Only then the metrics are those of its weights.
    is_scored = record.score is not None or (place_of(record.name) or (0, 0.0))[1] == math.inf
    score = record.metrics.get(judge.loader, {}).get(judge.metric) if is_scored else None
    return replace(record, score=score, judged_by=asdict(judge))
