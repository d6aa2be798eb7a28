"""The thread that makes a store equal to a staging folder while a run trains."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from runnerkit.storage.checksum import sha256_of
from runnerkit.storage.remote.files import Mark, files_of_checkpoints, link, logs_of, mark_of
from runnerkit.storage.remote.lease import Lease, LeaseLost
from runnerkit.storage.remote.manifest import CHECKPOINTS, FILE, Entry, Manifest
from runnerkit.storage.remote.store import PATIENCE_S, Replaced, Store

logger = logging.getLogger(__name__)

STAGED_GB = "RUNNERKIT_STAGED_GB"  # environment variable: most bytes that wait for their upload, in GB
LOGS_EVERY_S = 30.0
_REPORT_AFTER_S = 5.0  # of waiting before a message says so
_SHARE_OF_TIME = 0.1  # that uploading logs may take, as each is uploaded as a whole
_OUTBOX, _LOG = ".outbox", "log"


@dataclass
class Snapshot:
    """The checkpoints of a run at one time.

    Attributes:
        files: by object, the file in the outbox, where it stays if the run deletes the checkpoint; none for shards,
            which other processes have uploaded.
        size_bytes: of the files that are not in the store.
        deleted: objects of shards whose checkpoints the run has deleted.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    size_bytes: int = 0
    deleted: set[str] = field(default_factory=set)


class Uploads:
    """The uploads of a run: of the newest checkpoints when they are published, and of logs from time to time.

    Args:
        store: whose operations are repeated until :meth:`close`.
        manifest: what the store and `staging` hold.
        version: of the manifest's object, which the next one replaces: see :meth:`Store.write`.
    """

    def __init__(self, store: Store, staging: Path, lease: Lease, manifest: Manifest, version: str) -> None:
        self._store, self._staging, self._lease = store, staging, lease
        self._manifest, self._version = manifest, version
        self._in_store = set(manifest.objects)
        self._checksums = {mark_of(staging / name): each.sha256 for name, each in manifest.checkpoints.items()}
        self._uploaded: dict[str, Mark | None] = {name: mark_of(staging / name) for name in manifest.logs}
        self._shards: dict[str, dict[str, Entry]] = {}  # uploaded by the processes that made them, by checkpoint
        self._most_bytes = most_staged_bytes()
        self._changed = threading.Condition()  # for what follows
        self._pending: Snapshot | None = None
        self._current: Snapshot | None = None
        self._is_busy = self._is_closing = False
        self._logs_changed = self._is_hurried = False
        self._next_logs = 0.0
        self._num_done = 0  # operations, to see progress
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="runnerkit-upload", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Upload logs, unless that was done shortly before.

        Raises:
            Exception: uploading failed for good.
        """
        with self._changed:
            self._raise_error()
            self._logs_changed = True
            self._changed.notify_all()

    def publish(self, checksums: Mapping[str, str], shards: Mapping[str, Mapping[str, str]]) -> None:
        """Make the store's checkpoints equal to those in the staging folder, which must not change meanwhile.

        The call returns at once, unless more bytes are staged than allowed. Checkpoints that were published before, and
        whose upload has not begun, are skipped.

        Args:
            checksums: of files in the folder of checkpoints, by name, as far as they are known.
            shards: checksums of the shards of a checkpoint, by its name, which their processes have uploaded.
        Raises:
            Exception: uploading failed for good.
        """
        for checkpoint, files in shards.items():
            self._shards[checkpoint] = {file: Entry.of(each, shard_of=checkpoint) for file, each in files.items()}
            self._in_store |= {entry.object for entry in self._shards[checkpoint].values()}
        snapshot = self._snapshot(checksums)
        with self._changed:
            self._wait_for_room(snapshot.size_bytes)
            snapshot.files = {name: self._kept(path, name) for name, path in snapshot.files.items()}
            if self._pending is not None:  # no manifest will name its shards, but they are in the store
                snapshot.deleted |= self._pending.deleted
            self._pending = snapshot
            self._tidy()  # files of the snapshot that this one replaces
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until everything is in the store.

        Raises:
            Exception: uploading failed, or made no progress for :data:`PATIENCE_S`.
        """
        with self._changed:
            self._logs_changed = self._is_hurried = True
            self._changed.notify_all()
            self._wait_until(lambda: not (self._pending or self._is_busy or self._logs_changed))
            self._is_hurried = False

    def close(self) -> None:
        """End the thread, without waiting for what is staged."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._store.stop()
        self._thread.join(PATIENCE_S)

    # ----------------------------------------------------------------------------------------- in the run's threads

    def _snapshot(self, checksums: Mapping[str, str]) -> Snapshot:
        snapshot, folder = Snapshot(), self._staging / CHECKPOINTS
        known, self._checksums = self._checksums, {}  # forget files that are gone: others may get their inodes
        for path in files_of_checkpoints(self._staging):
            name = path.relative_to(self._staging).as_posix()
            if path.is_symlink():
                snapshot.links[name] = os.readlink(path)
            elif path.name not in self._shards.get(path.parent.name, {}):
                entry = snapshot.entries[name] = Entry.of(self._checksum(path, known, checksums))
                if entry.object not in snapshot.files:
                    snapshot.files[entry.object] = path
                    snapshot.size_bytes += 0 if entry.object in self._in_store else path.stat().st_size
        for checkpoint in [each for each in self._shards if not (folder / each).is_dir()]:
            snapshot.deleted |= {entry.object for entry in self._shards.pop(checkpoint).values()}
        for checkpoint, entries in self._shards.items():
            snapshot.entries |= {f"{CHECKPOINTS}/{checkpoint}/{file}": entry for file, entry in entries.items()}
        return snapshot

    def _checksum(self, path: Path, known: Mapping[Mark | None, str], given: Mapping[str, str]) -> str:
        mark = mark_of(path)
        if mark not in self._checksums:
            given_here = given.get(path.name) if path.parent.name == CHECKPOINTS else None
            self._checksums[mark] = known.get(mark) or given_here or sha256_of(path)
        return self._checksums[mark]

    def _kept(self, path: Path, name: str) -> Path:
        kept = self._staging / _OUTBOX / Path(name).name
        link(path, kept)
        return kept

    def _wait_for_room(self, size_bytes: int) -> None:
        """Wait for the upload that is under way, if the bytes of both are too many."""

        def staged_bytes() -> int:
            return self._current.size_bytes if self._current is not None else 0

        self._raise_error()
        if staged_bytes() and staged_bytes() + size_bytes > self._most_bytes:
            logger.warning(
                "%s: waiting for uploads, since %.3g GB are staged and %s is %g; the last error was: %s",
                self._store.url, (staged_bytes() + size_bytes) / 1e9, STAGED_GB, self._most_bytes / 1e9,
                self._store.last_error,
            )  # fmt: skip
            self._wait_until(lambda: not staged_bytes())

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        num_done = self._num_done
        began = since = time.monotonic()
        is_reported = False
        while not is_done():
            self._raise_error()
            self._changed.wait(1.0)
            if not is_reported and time.monotonic() - began > _REPORT_AFTER_S:
                is_reported = True
                logger.warning("%s: waiting for uploads", self._store.url)
            if self._num_done != num_done:
                num_done, since = self._num_done, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                raise OSError(
                    f"{self._store.url}: uploads made no progress for {PATIENCE_S:g} s; the last error was: "
                    f"{self._store.last_error}. What was not uploaded is in {self._staging}; the "
                    "next run of this logdir on this machine sets it aside"
                )
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------------------------------- in the upload thread

    def _run(self) -> None:
        try:
            while self._takes_work():
                began = time.monotonic()
                self._sync(self._current)
                with self._changed:
                    took_s = time.monotonic() - began
                    self._next_logs = time.monotonic() + max(LOGS_EVERY_S, took_s / _SHARE_OF_TIME)
                    self._current, self._is_busy = None, False
                    self._tidy()
                    self._changed.notify_all()
        except BaseException as error:  # raised where the run waits for uploads or begins one
            with self._changed:
                self._error, self._is_busy = error, False
                self._changed.notify_all()

    def _takes_work(self) -> bool:
        """Wait for something to upload; return False at the end."""
        with self._changed:
            while not (self._pending or (self._logs_changed and self._are_logs_due())):
                if self._is_closing:
                    return False
                self._changed.wait(self._next_logs - time.monotonic() if self._logs_changed else None)
            self._current, self._pending = self._pending, None
            self._is_busy, self._logs_changed = True, False
            self._tidy()
            return True

    def _are_logs_due(self) -> bool:
        return self._is_hurried or time.monotonic() >= self._next_logs

    def _sync(self, snapshot: Snapshot | None) -> None:
        """Upload objects, then logs, then the manifest; then delete what it does not name anymore."""
        logs = logs_of(self._staging)
        manifest = replace(self._manifest, run=self._lease.run, logs=logs)
        if snapshot is not None:
            manifest = replace(manifest, checkpoints=snapshot.entries, links=snapshot.links)
        changed = [name for name in logs if self._uploaded.get(name) != mark_of(self._staging / name)]
        if not changed and replace(manifest, run=self._manifest.run) == self._manifest:
            return
        retired = self._manifest.names - manifest.names
        if snapshot is not None:
            retired |= snapshot.deleted - manifest.objects
        unsettled = retired | (manifest.names - self._manifest.names)
        self._lease.announce(unsettled, self._store)
        for name in sorted(manifest.objects - self._in_store):
            assert snapshot is not None
            self._lease.check(self._store)
            self._store.put(name, snapshot.files[name], report=self._report)
            self._in_store.add(name)
            self._report()
        for name in changed:
            self._lease.check(self._store)
            self._put_log(name)
            self._report()
        self._put_manifest(manifest)
        for name in sorted(retired):
            self._lease.check(self._store)
            self._store.delete(name)
            self._in_store.discard(name)
            self._uploaded.pop(name, None)
            self._report()
        self._lease.settle(unsettled)

    def _report(self) -> None:
        """Count an operation, or a part of a large file."""
        self._num_done += 1

    def _put_log(self, name: str) -> None:
        """Upload a copy, since the run may be writing to the log."""
        path, copy = self._staging / name, self._staging / _OUTBOX / _LOG
        copy.parent.mkdir(exist_ok=True)
        mark = mark_of(path)
        with suppress(FileNotFoundError):
            shutil.copyfile(path, copy)
            self._store.put(name, copy, report=self._report)
            self._uploaded[name] = mark

    def _put_manifest(self, manifest: Manifest) -> None:
        self._lease.check(self._store)
        try:
            self._version = self._store.write(FILE, manifest.to_json(), replaces=self._version)
        except Replaced as error:
            raise LeaseLost(
                f"another run has written to {self._store.url} at the same time, so this one ends"
            ) from error
        self._manifest = manifest
        self._report()

    def _tidy(self) -> None:
        """Delete files from the outbox that are uploaded or replaced."""
        needed = {path for each in (self._pending, self._current) if each is not None for path in each.files.values()}
        outbox = self._staging / _OUTBOX
        for path in list(outbox.iterdir()) if outbox.is_dir() else []:
            if path not in needed and path.name != _LOG:
                path.unlink(missing_ok=True)


def most_staged_bytes() -> float:
    """Return the limit of bytes that wait for their upload.

    Raises:
        ValueError: the environment variable is not a number.
    """
    given = os.environ.get(STAGED_GB, "16")
    try:
        return 1e9 * float(given)
    except ValueError as error:
        raise ValueError(f"{STAGED_GB} must be a number of GB, got {given!r}") from error
