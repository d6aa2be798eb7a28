"""What does not count any more in a folder of checkpoints: cleared away, or set aside, when the next run starts.

That is what a killed run, or a bad disk, left; and what comes after the checkpoint that a run goes back to.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from runnerkit.storage.checkpoint import CheckpointFolder, name_again, remove
from runnerkit.storage.checkpoint_fault import fault_of, record_of
from runnerkit.storage.checkpoint_index import Record, name_at, place_of

logger = logging.getLogger(__name__)


def clean_up(folder: CheckpointFolder, *, resumed_from: Path | None = None) -> None:
    """Delete unfinished and retired files; let damaged checkpoints not count any more, so that good ones are kept.

    A damaged one gets the ending ".damaged". One process calls, before the run saves.

    Args:
        resumed_from: checkpoints after this one are read; of others, the size is looked at.
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
            logger.warning("checkpoint %s does not count any more: %s", folder.folder / record.name, fault)
    if bad or folder.is_rebuilt:
        folder.set_aside(bad, ending=".damaged")
    last = max((place for name in names if (place := place_of(name))), default=(0, 0.0))
    for path in folder.files():
        if path.name not in names and (place_of(path.name) or last) < last:
            remove(path)  # the index had forgotten it, and a kill came before it was deleted


def leave_branch(
    folder: CheckpointFolder, *, source: Path, place: tuple[int, float], best_first: Sequence[Record]
) -> None:
    """Let the checkpoints after the one that a run goes back to not count any more: not as newest, not as best.

    Their files get the ending ".abandoned". One process calls, before it cuts the logs back to `place`. A kill on the
    way leaves the old branch whole, or an index without it: from either `resume="auto"` goes on rightly.

    Args:
        source: the checkpoint, whatever its name, here or elsewhere.
        place: its epoch, and step within it (infinite at its end).
        best_first: the folder's records that have a score.
    """
    left = {record.name for record in folder.records if (place_of(record.name) or place) > place}
    if not left:
        return
    live = [record for record in folder.records if record.name not in left]
    path = source.resolve()
    if path.parent == folder.folder.resolve() and all(place_of(record.name) != place for record in live):
        live.append(_adopt(folder, path, place))
    best = [record for record in best_first if record in live]
    # The further names first: they may be any of the checkpoints that count.
    for alias, records in {"last": live[-1:], "best": best[:1]}.items():
        if folder.has_alias(alias):
            folder.point(alias, *records) if records else folder.drop_alias(alias)
    folder.records = [*live, *(record for record in folder.records if record.name in left)]
    folder.set_aside(left, ending=".abandoned")
    logger.warning(
        "the run goes back to %s: checkpoints after it do not count any more, and their files end in .abandoned: %s",
        source, ", ".join(sorted(left)),
    )  # fmt: skip


def _adopt(folder: CheckpointFolder, source: Path, place: tuple[int, float]) -> Record:
    """Describe a checkpoint that the index does not know, under a name of its own: "best.pth" will be another."""
    path = folder.folder / source.name
    if place_of(source.name) is None:
        path = folder.folder / f"{name_at(*place)}.pth"
        name_again(source, path)
    return record_of(path)
