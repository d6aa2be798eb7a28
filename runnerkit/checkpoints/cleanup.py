"""Cleanup of a folder of checkpoints when the next run starts: obsolete files are deleted or set aside.

These are leftovers of a killed run or a bad disk, and checkpoints after the one that a run resumes from.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from runnerkit.checkpoints.fault import fault_of, record_of
from runnerkit.checkpoints.folder import CheckpointFolder, name_again, remove
from runnerkit.checkpoints.index import Record, name_at, place_of

logger = logging.getLogger(__name__)


def clean_up(folder: CheckpointFolder, *, resumed_from: Path | None = None) -> None:
    """Delete unfinished and retired files; drop damaged checkpoints from the index, so that good ones are kept.

    A damaged one gets the ending ".damaged". One process calls this, before the run saves.

    Args:
        resumed_from: checkpoints after this one are read; for others, only the size is checked.
    """
    for path in folder.folder.glob(".*.tmp"):
        remove(path)
    names = [record.name for record in folder.records]
    newer = names[names.index(resumed_from.name) + 1 :] if resumed_from and resumed_from.name in names else []
    bad = set()
    for record in folder.records:
        fault = fault_of(folder.folder / record.name, record, quick=record.name not in newer)
        if fault is not None:
            bad.add(record.name)
            logger.warning("checkpoint %s is no longer used: %s", folder.folder / record.name, fault)
    if bad or folder.is_rebuilt:
        folder.set_aside(bad, ending=".damaged")
    last = max((place for name in names if (place := place_of(name))), default=(0, 0.0))
    for path in folder.files():
        if path.name not in names and (place_of(path.name) or last) < last:
            remove(path)  # no longer in the index, but the run was killed before deleting it


def set_branch_aside(
    folder: CheckpointFolder, *, source: Path, place: tuple[int, float], best_first: Sequence[Record]
) -> None:
    """Drop the checkpoints after the one that a run resumes from, so that none of them is the newest or the best.

    Their files get the ending ".abandoned". One process calls this, before it cuts the logs back to `place`. A kill
    halfway leaves the old branch complete, or an index without it: `resume="auto"` resumes correctly from either.

    Args:
        source: the checkpoint, with any name, here or elsewhere.
        place: its epoch, and step within it (infinite at its end).
        best_first: the folder's records that have a score, best first.
    """
    left = {record.name for record in folder.records if (place_of(record.name) or place) > place}
    if not left:
        return
    live = [record for record in folder.records if record.name not in left]
    path = source.resolve()
    if path.parent == folder.folder.resolve() and all(place_of(record.name) != place for record in live):
        live.append(_adopt(folder, path, place))
    best = [record for record in best_first if record in live]
    # The aliases first: they may name any checkpoint in the index.
    for alias, records in {"last": live[-1:], "best": best[:1]}.items():
        if folder.has_alias(alias):
            folder.point(alias, *records) if records else folder.drop_alias(alias)
    folder.records = [*live, *(record for record in folder.records if record.name in left)]
    folder.set_aside(left, ending=".abandoned")
    logger.warning(
        "the run resumes from %s: checkpoints after it are no longer used, and their files end in .abandoned: %s",
        source, ", ".join(sorted(left)),
    )  # fmt: skip


def _adopt(folder: CheckpointFolder, source: Path, place: tuple[int, float]) -> Record:
    """Describe a checkpoint that is not in the index, under a lasting name: "best.pth" will be another one."""
    path = folder.folder / source.name
    if place_of(source.name) is None:
        path = folder.folder / f"{name_at(*place)}.pth"
        name_again(source, path)
    return record_of(path)
