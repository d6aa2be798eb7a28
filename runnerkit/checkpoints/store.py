"""How and where a run stores its checkpoints; the callback that holds a store decides when."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runnerkit.checkpoints.cleanup import clean_up, set_branch_aside
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.checkpoints.index import Record, name_at
from runnerkit.checkpoints.judge import Judge, best_first
from runnerkit.storage import claims
from runnerkit.storage.atomic_file import check_folder
from runnerkit.storage.remote.urls import shown
from runnerkit.support.background import Background
from runnerkit.types import StateDict


class CheckpointStore:
    """The checkpoints of a run in `logdir`/checkpoints, and behind the URL of `logdir` if it has one.

    Only rank zero opens, writes and chooses; all ranks prepare shards, wait and close.

    Args:
        judge: of the best checkpoint; None: the one that judged those in the folder, if any.
        topk: number of best checkpoints to keep.
        save_last, save_best: which of the two names to create.
    """

    def __init__(self, logdir: Path, judge: Judge | None, *, topk: int, save_last: bool, save_best: bool) -> None:
        self.logdir, self.folder = logdir, logdir / "checkpoints"
        self.judge = judge
        self.topk, self.save_last, self.save_best = topk, save_last, save_best
        self._background = Background()

    def open(self, *, continues: bool, resumed_from: Path | None) -> bool:
        """Prepare the folder for a run; return whether it has checkpoints.

        Raises:
            FileExistsError: it has those of a run that this one does not continue.
            OSError: it cannot be written to.
        """
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
        """Set checkpoints after `source` aside: see :meth:`ICheckpointCallback.leave_branch`."""
        folder = CheckpointFolder(self.folder)
        if self.judge is not None:
            self.judge.judge_again(folder)
        set_branch_aside(folder, source=source, place=place, best_first=self._best_first(folder, stage))
        self._point(folder, stage)  # the process may have been killed between writing the index and the names

    def name(self, epoch: int, step: float, *, is_sharded: bool) -> str:
        """Return the name of a checkpoint; `step` is infinite at an epoch's end."""
        return name_at(epoch, step) if is_sharded else f"{name_at(epoch, step)}.pth"

    def prepare_shards(self, name: str, *, is_main_process: bool) -> Path:
        """Return the folder that an engine writes a checkpoint's shards to, before :meth:`write` names it."""
        self.wait()  # the previous save may still be writing to this folder
        temporary = CheckpointFolder(self.folder).temporary(name)
        if is_main_process:
            check_folder(self.folder)
            if temporary.exists():
                shutil.rmtree(temporary)  # left by a killed run
        return temporary

    def start(self, write: Callable[[], None]) -> None:
        """Let a thread call `write`, once the previous write has ended."""
        self._background.start(write)

    def write(self, state: StateDict, name: str, what: Mapping[str, Any]) -> None:
        """Write a checkpoint, name the last and the best, and delete those that are neither.

        Args:
            what: the fields of its record in the index: see :meth:`CheckpointFolder.add`.
        """
        check_folder(self.folder)
        folder = CheckpointFolder(self.folder)
        judge = self.judge.to_dict() if self.judge is not None else None
        record = folder.add(name, state, judged_by=judge, **what)
        best = self._point(folder, record.stage)
        # Keep the last but one as well: a resume falls back to it if the last is damaged.
        folder.keep([*best[: self.topk], *folder.records[-2:]])
        self.publish(folder.records, {name: state["shards"]["files"]} if "shards" in state else {})

    def publish(self, records: Sequence[Record], shards: Mapping[str, Mapping[str, str]]) -> None:
        """Copy the folder to the store behind the logdir's URL, in the background.

        Args:
            records: of all checkpoints that are kept.
            shards: checksums of the newest one's shards, by its name and theirs.
        """
        claims.publish(self.logdir, {each.name: each.sha256 for each in records}, shards)

    def best(self, stage: str) -> tuple[Path, str] | None:
        """Return the path and the URL of the best checkpoint of a stage; None if none has a score."""
        folder = CheckpointFolder(self.folder)
        path = next((self.folder / each.name for each in self._best_first(folder, stage)), None)
        return (path, shown(path)) if path is not None else None

    def local(self, path: Path, url: str) -> Path:
        """Return the local path of a checkpoint that :meth:`best` found on rank zero, perhaps on another machine."""
        return claims.bring(path, url)

    def newest(self) -> str | None:
        """Return the name of the newest checkpoint."""
        return next((each.name for each in reversed(CheckpointFolder(self.folder).records)), None)

    def wait(self, *, stored: bool = False) -> None:
        """Wait until everything is written; `stored`: and has been copied to the store behind the URL."""
        self._background.wait()
        if stored:
            claims.wait(self.logdir)

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._background.close()

    def _point(self, folder: CheckpointFolder, stage: str | None) -> list[Record]:
        """Point the names "last" and "best" to their checkpoints; return the scored checkpoints, best first."""
        best = self._best_first(folder, stage)
        if self.save_last and folder.records:
            folder.point("last", folder.records[-1])
        if self.save_best and best:
            folder.point("best", best[0])
        return best

    def _best_first(self, folder: CheckpointFolder, stage: str | None) -> list[Record]:
        """Sort the scored checkpoints of one stage, best first; scores of different stages are not comparable."""
        return best_first([record for record in folder.records if record.stage in (stage, None)], self.judge)
