"""Choice of the best checkpoint: records are compared by one metric only."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.checkpoints.index import Record, place_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judge:
    """The metric that selects the best checkpoint."""

    loader: str
    metric: str
    minimize: bool

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self | None:
        """Return the one that judged the last of the records that have a score."""
        judges = [each.judged_by for each in records if each.score is not None and each.judged_by is not None]
        return cls(**judges[-1]) if judges else None

    def __str__(self) -> str:
        return f"{self.metric!r} of loader {self.loader!r} ({'smaller' if self.minimize else 'larger'} is better)"

    def to_dict(self) -> dict[str, Any]:
        """Return what a record's `judged_by` holds."""
        return asdict(self)

    def rank(self, records: Iterable[Record]) -> list[Record]:
        """Sort the records that this metric has judged, best first."""
        known = [each for each in records if each.score is not None and not math.isnan(each.score)]
        return sorted(filter(self._has_judged, known), key=lambda each: each.score or 0.0, reverse=not self.minimize)

    def judge_again(self, folder: CheckpointFolder) -> None:
        """Give the checkpoints of a run that another metric selected the scores of this one, from their metrics.

        A checkpoint without it loses its score and cannot be the best.
        """
        if all(map(self._has_judged, folder.records)):
            return
        before = Judge.of(folder.records)
        judged = [each if self._has_judged(each) else self._judged(each) for each in folder.records]
        folder.replace(judged)
        if before is None:
            return
        without = [each.name for each in judged if each.score is None]
        logger.warning(
            "the best checkpoint was selected by %s, and is now by %s: earlier checkpoints are compared by that%s",
            before, self, f", except {', '.join(without)}, which were saved without it" if without else "",
        )  # fmt: skip

    def _has_judged(self, record: Record) -> bool:
        if record.judged_by is None:
            return record.score is not None  # an earlier version did not say by what
        return record.judged_by == self.to_dict()

    def _judged(self, record: Record) -> Record:
        # Only then the metrics are those of its weights.
        is_scored = record.score is not None or (place_of(record.name) or (0, 0.0))[1] == math.inf
        score = record.metrics.get(self.loader, {}).get(self.metric) if is_scored else None
        return replace(record, score=score, judged_by=self.to_dict())
