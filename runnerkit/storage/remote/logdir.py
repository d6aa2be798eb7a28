"""A run's logdir in a store: the staging folder is filled when the run starts, and uploaded while it trains."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from runnerkit.storage.logdir_lock import FILE as LOCK
from runnerkit.storage.logdir_lock import LogdirInUse, lock, no_lock
from runnerkit.storage.remote.files import download
from runnerkit.storage.remote.lease import PLACE, Lease
from runnerkit.storage.remote.manifest import FILE, Manifest
from runnerkit.storage.remote.store import Replaced, Store
from runnerkit.storage.remote.uploads import Uploads
from runnerkit.storage.remote.urls import url_of

logger = logging.getLogger(__name__)

_KEPT = ".kept"  # file that marks a staging folder with files that could not be uploaded
_TRACES = ("hparams.yml", "environment.json", "metrics.jsonl", "checkpoints/index.json", "csv/train.csv")
NEW = ".new"  # folder of files for a logdir, written before its run began


class StoredLogdir:
    """The right of this process to write to a logdir in a store, and the uploads of what it writes to `staging`.

    Args:
        staging: the folder that :func:`local_path` returns for the URL; it is emptied, and filled from the store.
    Raises:
        FileExistsError: another run is writing to the logdir.
        OSError: the store cannot be reached, or refuses access.
    """

    def __init__(self, staging: Path) -> None:
        url = url_of(staging)
        assert url is not None
        self._staging, self._store = staging, Store(url)
        with ExitStack() as undo:
            self._unlock = lock(staging)
            undo.callback(self._unlock)
            undo.callback(shutil.rmtree, staging / NEW, ignore_errors=True)  # a refused run leaves nothing
            self._lease = Lease(self._store, staging, is_locked=self._unlock is not no_lock)
            undo.callback(self._lease.release)
            found = self._store.read(FILE)
            manifest, version = (Manifest.from_json(found[0], url), found[1]) if found else (Manifest(), "new")
            if found is None:
                self._refuse_copied_run()
            self._fill(manifest)
            if self._lease.is_taken_over:
                manifest, version = self._take_over(manifest, version)
            store = self._store.with_patience(None)  # training continues while it fails
            self._uploads = Uploads(store, staging, self._lease, manifest, version)
            undo.pop_all()

    def flush(self) -> None:
        """See :meth:`Uploads.flush`."""
        self._uploads.flush()

    def publish(self, checksums: Mapping[str, str], shards: Mapping[str, Mapping[str, str]]) -> None:
        """See :meth:`Uploads.publish`."""
        self._uploads.publish(checksums, shards)

    def wait(self) -> None:
        """See :meth:`Uploads.wait`."""
        self._uploads.wait()

    def announce(self, objects: list[str]) -> None:
        """Record that other processes are about to upload these objects."""
        self._lease.announce(objects)

    def close(self) -> None:
        """Wait for the last upload, let other runs in, and delete the staging folder.

        Raises:
            Exception: uploading failed; then the staging folder stays.
        """
        with ExitStack() as closing:  # in reverse order, each even if another one fails
            closing.callback(self._leave)
            closing.callback(self._lease.release)
            closing.callback(self._uploads.close)
            try:
                self._uploads.wait()
            except BaseException:
                (self._staging / _KEPT).touch()
                raise
            closing.callback(self._empty)

    def _refuse_copied_run(self) -> None:
        """Raise if a run was copied to the store by other means: this one would overwrite its logs."""
        for name in set(_TRACES) - set(self._lease.unsettled):
            if self._store.exists(name):
                raise FileExistsError(
                    f"{self._store.url} holds {name} of another run, but no {FILE}, which a run writes to a store: "
                    "choose another logdir, and pass resume= this URL to continue that run there"
                )

    def _fill(self, manifest: Manifest) -> None:
        """Make the staging folder equal to the store."""
        if (self._staging / _KEPT).exists():
            self._move_failed_uploads()
        self._empty(but=NEW)
        download(self._store, manifest, self._staging)
        new = self._staging / NEW
        for path in list(new.iterdir()) if new.is_dir() else []:
            path.replace(self._staging / path.name)
        shutil.rmtree(new, ignore_errors=True)

    def _move_failed_uploads(self) -> None:
        """Keep what an earlier run on this machine could not upload."""
        kept = self._staging.with_name(f"{self._staging.name}.kept-{os.urandom(4).hex()}")
        kept.mkdir()
        for path in list(self._staging.iterdir()):
            if path.name not in (LOCK, PLACE, NEW, _KEPT):
                path.replace(kept / path.name)
        logger.warning("%s: what the last run here could not upload is in %s; delete it", self._store.url, kept)

    def _take_over(self, manifest: Manifest, version: str) -> tuple[Manifest, str]:
        """Delete what a killed run left, and write the manifest, so that it cannot if it is still there."""
        manifest = replace(manifest, run=self._lease.run)
        try:
            version = self._store.write(FILE, manifest.to_json(), replaces=version)
        except Replaced as error:
            raise LogdirInUse(
                f"another run has just written to {self._store.url}: wait for it to end, or choose another logdir"
            ) from error
        for name in set(self._lease.unsettled) - manifest.names:
            self._store.delete(name)
        self._lease.settle(self._lease.unsettled)
        return manifest, version

    def _empty(self, *, but: str = "") -> None:
        for path in self._staging.iterdir():
            if path.name in (LOCK, PLACE, but):
                continue
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _leave(self) -> None:
        is_empty = {path.name for path in self._staging.iterdir()} <= {LOCK, PLACE}
        if is_empty:
            (self._staging / PLACE).unlink(missing_ok=True)
        self._unlock()
        if is_empty:
            with suppress(OSError):  # another run has just come
                self._staging.rmdir()
