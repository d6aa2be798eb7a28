"""What a killed run, or a bad disk, left in a folder of checkpoints: cleared away when the next run starts."""

import logging
from pathlib import Path

from runnerkit.checkpoint import CheckpointFolder, fault_of, remove
from runnerkit.checkpoint_index import place_of

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
        folder.set_aside(bad)
    last = max((place for name in names if (place := place_of(name))), default=(0, 0.0))
    for path in folder.files():
        if path.name not in names and (place_of(path.name) or last) < last:
            remove(path)  # the index had forgotten it, and a kill came before it was deleted
