"""Store of a run's checkpoints: how and where they are written and kept; the callback that holds it decides when."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runnerkit.checkpoints.fault import fault_of, record_of
from runnerkit.checkpoints.folder import CheckpointFolder, link_or_copy, remove
from runnerkit.checkpoints.index import Record, name_at, place_of
from runnerkit.checkpoints.judge import best_first, judge_again, judge_of
from runnerkit.monitor import Monitor
from runnerkit.storage import claims
from runnerkit.storage.atomic_file import check_folder
from runnerkit.storage.remote.urls import shown
from runnerkit.support.background import Background
from runnerkit.types import StateDict

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of a run in `logdir`/checkpoints, and behind the URL of `logdir` if it has one.

    Only rank zero opens, writes and chooses; all ranks prepare shards, wait and close.

    Args:
        monitor: selects the best checkpoint; None: the one that judged those in the folder, if any.
        keep_best: number of best checkpoints to keep.
        save_last, save_best: which of the two names to create.

    Attributes:
        folder: of the files; it, `monitor`, `keep_best`, `save_last` and `save_best` may be set until the run starts.
    """

    def __init__(
        self, logdir: Path, monitor: Monitor | None, *, keep_best: int, save_last: bool, save_best: bool
    ) -> None:
        self.logdir, self.folder = logdir, logdir / "checkpoints"
        self.monitor = monitor
        self.keep_best, self.save_last, self.save_best = keep_best, save_last, save_best
        self._background = Background()  # for writes that the run does not wait for

    def open(self, *, continues: bool, resumed_from: Path | None) -> bool:
        """Prepare the folder and return whether it has checkpoints, which only a run that `continues` accepts."""
        folder = CheckpointFolder(self.folder)
        if folder.records and not continues:
            raise FileExistsError(
                f"{shown(self.folder)} holds the checkpoints of another run: pass "
                'resume="auto" (or resume_runner) to resume it, or choose another logdir'
            )
        folder.make()
        has_any = bool(folder.records)
        clean_up(folder, resumed_from=resumed_from)
        return has_any

    def leave_branch(self, source: Path, *, stage: str, place: tuple[int, float]) -> None:
        """Set the checkpoints of a run aside that follow the one that it resumes from: :func:`set_branch_aside`."""
        folder = CheckpointFolder(self.folder)
        if self.monitor is not None:
            judge_again(folder, self.monitor)
        set_branch_aside(folder, source=source, place=place, best_first=self._best_first(folder, stage))
        self._set_aliases(folder, stage)  # the process may have been killed between writing the index and the names

    def prepare_shards(self, name: str, *, is_main_process: bool) -> Path:
        """Return the folder that an engine writes a checkpoint's shards to, before :meth:`write` names it."""
        self.wait()  # the previous save may still be writing to this folder
        temporary = CheckpointFolder(self.folder).temporary(name)
        if is_main_process:
            check_folder(self.folder)
            if temporary.exists():
                shutil.rmtree(temporary)  # left by a killed run
        return temporary

    def write(self, state: StateDict, name: str, what: Mapping[str, Any]) -> None:
        """Write a checkpoint, described by `what` in the index; name the last and the best, and delete the others."""
        check_folder(self.folder)
        folder = CheckpointFolder(self.folder)
        judge = asdict(self.monitor) if self.monitor is not None else None
        record = folder.add(name, state, judged_by=judge, **what)
        best = self._set_aliases(folder, record.stage)
        # Keep the last but one as well: a resume falls back to it if the last is damaged.
        folder.keep([*best[: self.keep_best], *folder.records[-2:]])
        self.publish(folder.records, {name: state["shards"]["files"]} if "shards" in state else {})

    def start(self, write: Callable[[], None]) -> None:
        """Call `write` in a thread, after the writes that were started before."""
        self._background.start(write)

    def publish(self, records: Sequence[Record], shards: Mapping[str, Mapping[str, str]]) -> None:
        """Copy kept checkpoints to the store behind the logdir's URL, in the background.

        Args:
            shards: checksums of the newest one's shards, by its name and theirs.
        """
        claims.publish(self.logdir, {each.name: each.sha256 for each in records}, shards)

    def best(self, stage: str) -> tuple[Path, str] | None:
        """Return the path and the URL of the best checkpoint of a stage; None if none has a score."""
        record = self.best_record(stage)
        if record is None:
            return None
        path = self.folder / record.name
        return path, shown(path)

    def best_record(self, stage: str) -> Record | None:
        """Return the record of the best checkpoint of a stage; None if none has a score."""
        return next(iter(self._best_first(CheckpointFolder(self.folder), stage)), None)

    def local(self, path: Path, url: str) -> Path:
        """Return the local path of what :meth:`best` returned on rank zero, perhaps on another machine."""
        return claims.bring(path, url)

    def newest(self) -> str | None:
        """Return the name of the newest checkpoint."""
        records = CheckpointFolder(self.folder).records
        return records[-1].name if records else None

    def wait(self, *, stored: bool = False) -> None:
        """Wait until everything is written; `stored`: and has been copied to the store behind the URL."""
        self._background.wait()
        if stored:
            claims.wait(self.logdir)

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._background.close()

    def _set_aliases(self, folder: CheckpointFolder, stage: str | None) -> list[Record]:
        """Point the names "last" and "best" to their checkpoints; return the scored checkpoints, best first."""
        best = self._best_first(folder, stage)
        if self.save_last and folder.records:
            folder.set_alias("last", folder.records[-1])
        if self.save_best and best:
            folder.set_alias("best", best[0])
        return best

    def _best_first(self, folder: CheckpointFolder, stage: str | None) -> list[Record]:
        """Sort the scored checkpoints of one stage, best first; scores of different stages are not comparable."""
        records = [record for record in folder.records if record.stage in (stage, None)]
        judge = self.monitor or judge_of(records)
        return best_first(records, judge) if judge is not None else []


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
            folder.set_alias(alias, *records) if records else folder.drop_alias(alias)
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
        link_or_copy(source, path)
    return record_of(path)
