"""``lease.json``: which run may write to a logdir in a store, where nothing can be locked.

The run that holds the lease counts in it every few seconds, its heartbeat. Another run takes it over if the count has
stood still for :data:`TAKEOVER_S` by its own clock, so machines' clocks need not agree. A run on the machine of a
killed one need not wait: it has the lock of the same staging folder, which the kernel released.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runnerkit.storage.logdir_lock import LogdirInUse
from runnerkit.storage.remote.manifest import LEASE, is_run_file
from runnerkit.storage.remote.store import Replaced, Store

logger = logging.getLogger(__name__)

BEAT_S = 10.0
TAKEOVER_S = 60.0
RELEASE_PATIENCE_S = 10.0
PLACE = ".place"  # file of a staging folder with a random name for it


class LeaseLost(FileExistsError):
    """Error of a run whose lease another run has taken over."""


class Lease:
    """The right of this process to write to a logdir, kept by a thread.

    Args:
        store: of the logdir.
        staging: the local folder.
        is_locked: whether this process has locked it, so that no run with the same folder is alive.
    Raises:
        LogdirInUse: another run holds the lease.
        OSError: the store cannot be reached; see :class:`Store`.
    """

    def __init__(self, store: Store, staging: Path, *, is_locked: bool = True) -> None:
        self._store = store
        self._content: dict[str, Any] = {
            "run": os.urandom(8).hex(),
            "holder": f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}",
            "place": _place_of(staging) if is_locked else os.urandom(8).hex(),
            "beat": 0,
            "unsettled": [],
        }
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lost: LeaseLost | None = None
        self.is_taken_over = False
        self.unsettled: list[str] = []  # objects that the run before this one was uploading or deleting
        self._held_at = time.monotonic()
        self._version = self._acquire()
        self._beats = store.with_patience(BEAT_S)
        self._thread = threading.Thread(target=self._beat, name="runnerkit-lease", daemon=True)
        self._thread.start()

    @property
    def run(self) -> str:
        """A name for this attempt of a run."""
        return str(self._content["run"])

    def check(self, store: Store | None = None) -> None:
        """Raise if another run has taken over; after a while without a heartbeat, look.

        Args:
            store: one with another patience than the lease's.
        Raises:
            LeaseLost: it has.
        """
        self._raise_if_lost()
        if time.monotonic() - self._held_at > TAKEOVER_S / 2:  # this process was suspended, or the store was gone
            with self._lock:
                self._write(store or self._store)

    def announce(self, names: Iterable[str], store: Store | None = None) -> None:
        """Record the names of objects before they are uploaded or deleted.

        The run after a killed one deletes the objects that the manifest does not name.

        Args:
            store: one with another patience than the lease's.
        Raises:
            LeaseLost: another run has taken over.
        """
        with self._lock:
            self._write(store or self._store, unsettled=sorted({*self._content["unsettled"], *names}))

    def settle(self, names: Iterable[str]) -> None:
        """Forget announced names: the manifest names them, or they are deleted. The next heartbeat records it."""
        with self._lock:
            self._content["unsettled"] = sorted({*self._content["unsettled"]} - {*names})

    def release(self) -> None:
        """Let other runs in; a store that fails keeps them out for :data:`TAKEOVER_S` longer."""
        self._ended.set()
        self._beats.stop()
        self._thread.join()
        store = self._store.with_patience(RELEASE_PATIENCE_S)
        try:
            if self._lost is None and not self._content["unsettled"] and _read(store).get("run") == self.run:
                store.delete(LEASE)
        except OSError as error:
            logger.warning("%s: the next run waits up to %g s: %s", store.url, TAKEOVER_S, error)

    def _acquire(self) -> str:
        try:
            return self._store.write(LEASE, self._json(), replaces="new")
        except Replaced:
            pass
        found = self._store.read(LEASE)
        seen, seen_at, is_reported = found, time.monotonic(), False
        while found is not None:
            other = _parsed(found[0])
            is_dead = other.get("place") == self._content["place"]  # its lock is ours now
            if is_dead or time.monotonic() - seen_at >= TAKEOVER_S:
                logger.warning("%s: taking over from %s, which has ended or hangs", self._store.url, _who(other))
                self.is_taken_over = True
                unsettled = other.get("unsettled")
                self.unsettled = [*filter(is_run_file, unsettled)] if isinstance(unsettled, list) else []
                self._content["unsettled"] = self.unsettled  # this run may be killed before it deletes them
                break
            if not is_reported:
                is_reported = True
                logger.warning(
                    "%s: waiting up to %g s for a sign of life of another run, %s", self._store.url, TAKEOVER_S,
                    _who(other),
                )  # fmt: skip
            time.sleep(min(1.0, TAKEOVER_S / 5))
            found = self._store.read(LEASE)
            if found is not None and seen is not None and found[0] != seen[0]:
                if _parsed(found[0]).get("run") == _parsed(seen[0]).get("run"):
                    raise LogdirInUse(
                        f"another run is writing to {self._store.url}: {_who(other)}. Wait for it to end, or choose "
                        "another logdir"
                    )
                seen, seen_at = found, time.monotonic()
        try:
            return self._store.write(LEASE, self._json(), replaces=found[1] if found is not None else "new")
        except Replaced as error:
            raise LogdirInUse(f"another run has just taken {self._store.url}; choose another logdir") from error

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                with self._lock:
                    self._write(self._beats, beat=self._content["beat"] + 1)
            except LeaseLost:
                return
            except Exception as error:
                logger.warning("%s: no heartbeat: %s", self._store.url, error)

    def _write(self, store: Store, **changes: Any) -> None:
        self._raise_if_lost()
        began = time.monotonic()
        if not store.is_conditional and _read(store).get("run") != self.run:
            self._lose(store)
        self._content |= changes
        try:
            self._version = store.write(LEASE, self._json(), replaces=self._version)
        except Replaced as error:
            found = store.read(LEASE)
            if found is None or _parsed(found[0]).get("run") != self.run:
                self._lose(store, error)
            else:  # an earlier write of ours, whose answer was lost
                self._version = store.write(LEASE, self._json(), replaces=found[1])
        self._held_at = began

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _lose(self, store: Store, error: Exception | None = None) -> None:
        self._lost = LeaseLost(
            f"another run has taken over {store.url}: {_who(_read(store))}. This run was not heard of for "
            f"{TAKEOVER_S:g} s, and has ended without changing anything since"
        )
        raise self._lost from error

    def _json(self) -> bytes:
        return json.dumps(self._content, indent=1).encode()


def holder(store: Store) -> str | None:
    """Describe the run that holds the lease, or held it when it was killed; None without one."""
    found = store.read(LEASE)
    return _who(_parsed(found[0])) if found is not None else None


def _place_of(staging: Path) -> str:
    path = staging / PLACE
    if not path.exists():
        path.write_text(os.urandom(8).hex(), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _read(store: Store) -> dict[str, Any]:
    found = store.read(LEASE)
    return _parsed(found[0]) if found is not None else {}


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _who(content: dict[str, Any]) -> str:
    return str(content.get("holder", "one that cannot be read"))
