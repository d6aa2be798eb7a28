"""Check that all ranks train on equally many batches, through the store: a collective would wait forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # public, though not in torch's __all__

from runnerkit.engines.failures.failure import FAILED, PeerLostError
from runnerkit.engines.failures.stuck import answer

_POLL_S = 1.0
_LONGEST_PAUSE_S = 0.05


class Lockstep:
    """Progress of a run's training loaders, compared across ranks.

    A rank that reaches the end of a loader waits for the others. Ranks that reach a batch beyond it report that in the
    store. They may be stuck there in a collective, so a thread does this once a second.

    Args:
        store: store of the process group.
        timeout_s: seconds that a rank waits for the others.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self._num_visits = 0
        self._under_way: tuple[str, Callable[[], int]] | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def enter(self, position: Callable[[], int]) -> None:
        """Begin a loader; every rank must call this.

        Args:
            position: returns the number of the current batch; called in a thread.
        """
        self._num_visits += 1
        self._under_way = f"loader/{self._num_visits}", position
        if self._thread is None:
            self._thread = threading.Thread(target=self._compare_regularly, name="runnerkit-lockstep", daemon=True)
            self._thread.start()

    def leave(self, num_batches: int, *, key: str) -> None:
        """End the loader `key` together with the others; every rank must call this.

        Raises:
            ValueError: a rank had a different number of batches.
            PeerLostError: a rank has failed.
            TimeoutError: a rank did not reach the end in time.
        """
        assert self._under_way is not None
        name, store = self._under_way[0], self._store
        self._under_way = None
        store.set(f"{name}/{self._rank}", str(num_batches))
        if not store.check([f"{name}/first"]):
            store.set(f"{name}/first", f"{self._rank} {num_batches}")
        store.add(f"{name}/equal to {num_batches}", 1)
        if store.add(f"{name}/count", 1) == self._world_size:
            store.set(f"{name}/all", "")
        self._wait_for_all(name, num_batches, key)
        if int(store.get(f"{name}/equal to {num_batches}")) != self._world_size:
            counts = [int(store.get(f"{name}/{rank}")) for rank in range(self._world_size)]
            raise ValueError(f"{_unlike(key)}: the ranks had {counts}")
        store.delete_key(f"loader/{self._num_visits - 1}/{self._rank}")  # no longer read

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _wait_for_all(self, name: str, num_batches: int, key: str) -> None:
        deadline, pause = time.monotonic() + self._timeout_s, 0.0005
        while not self._store.check([f"{name}/all"]):
            if self._store.check([f"{name}/further"]):
                rank, batch = self._store.get(f"{name}/further").decode().split()
                raise ValueError(
                    f"{_unlike(key)}: rank {self._rank} had {num_batches}, but rank {rank} is at batch {batch}"
                )
            if self._store.check([FAILED]):
                raise PeerLostError("another rank has failed")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self._rank} had {num_batches} batches of loader {key!r} and waited {self._timeout_s:g} "
                    "s for the others to end it; the engine's timeout_s= sets this limit"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _compare_regularly(self) -> None:
        try:
            while not self._closed.wait(_POLL_S):
                self._compare()
                answer(self._store, rank=self._rank)
        except DistError:
            return  # the store is gone, and with it rank zero; the main thread will notice

    def _compare(self) -> None:
        under_way = self._under_way
        if under_way is None:
            return
        name, batch = under_way[0], under_way[1]()
        if under_way is not self._under_way or not self._store.check([f"{name}/first"]):
            return
        if batch > int(self._store.get(f"{name}/first").split()[1]):
            self._store.set(f"{name}/further", f"{self._rank} {batch}")


def _unlike(key: str) -> str:
    return (
        f"training loader {key!r} must have equally many batches on all ranks; return the full loader on every rank, "
        "which the engine shards evenly, and end it early on all ranks or on none"
    )
