"""Kill runs whose logdir is in a store repeatedly, with faults between them and the store, until they complete.

python -m tests.faults.store_drill --kills 50 --faults 50 --page docs/reliability.md

Each must equal the run on a disk that was not killed, leave no object that it does not need, and touch no other.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.remote.store import Store
from runnerkit.storage.remote.urls import STAGING
from tests.data.stream_sources import write_files
from tests.faults import job, proxy
from tests.faults.drill import PLACES, Kill, Place, Tally, attempt, report, table_of_streams, whole_run
from tests.faults.drill import table as table_of_kills
from tests.faults.fingerprint import differences, fingerprint
from tests.faults.proxy import Proxy, Rule
from tests.server_process import serving
from tests.storage.s3_server import Bucket, environment

MANIFEST, LEASE, OBJECTS = r"manifest\.json$", r"lease\.json$", "checkpoints/objects/"
# Only the main process comes there, but see SHARD_PLACES.
STORE_PLACES: dict[str, Place] = {
    "before an object is uploaded": Place(Store, "put", "before", 14, OBJECTS, rank=0),
    "after an object is uploaded": Place(Store, "put", "after", 14, OBJECTS, rank=0),
    "before a log is uploaded": Place(Store, "put", "before", 20, f"(?!{OBJECTS})", rank=0),
    "after a log is uploaded": Place(Store, "put", "after", 20, f"(?!{OBJECTS})", rank=0),
    "before the manifest is written": Place(Store, "write", "before", 8, MANIFEST, rank=0),
    "after the manifest is written": Place(Store, "write", "after", 8, MANIFEST, rank=0),
    "before an old object is deleted": Place(Store, "delete", "before", 12, OBJECTS, rank=0),
    "after an old object is deleted": Place(Store, "delete", "after", 12, OBJECTS, rank=0),
    "before a heartbeat or an announcement": Place(Store, "write", "before", 20, LEASE, rank=0),
    "after a heartbeat or an announcement": Place(Store, "write", "after", 20, LEASE, rank=0),
    "before an object is downloaded": Place(Store, "get", "before", 8, rank=0),
    "after the manifest is read": Place(Store, "read", "after", 1, MANIFEST, rank=0),
}
ALL_PLACES = {**PLACES, **STORE_PLACES}
# Each process uploads its own shards.
SHARD_PLACES = {name: place._replace(rank=None) for name, place in STORE_PLACES.items() if place.name == "put"}
SHARE_OF_EMPTY_DISKS = 0.5
_numbers = itertools.count(1)  # of buckets
CHANGED_OR_LEFT = "objects of other programs that a run changed, or objects that a run left behind"
FAULTS = (
    Rule(proxy.DROPPED, 0.01), Rule(proxy.LOST, 0.015), Rule(proxy.DELAYED, 0.01, seconds=0.3),
    Rule(proxy.SHORT_REQUEST, 0.01, method="PUT"), Rule(proxy.SHORT_RESPONSE, 0.01),
    Rule(proxy.ERROR, 0.01), Rule(proxy.SLOW_DOWN, 0.01), Rule(proxy.GONE, 0.002, seconds=1.0),
)  # fmt: skip


@dataclass
class StoreTally(Tally):
    """Results of a drill in a store.

    Attributes:
        faults: number of injected faults by kind.
        num_empty_disks: number of attempts that started with an empty staging folder.
        others: objects of others that changed, and objects that completed runs left.
    """

    faults: Counter[str] = field(default_factory=Counter)
    num_empty_disks: int = 0
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """The logdir of one run: a URL, and a local folder for its staging folders, beside the files of a stream."""

    url: str
    folder: Path
    endpoint: str
    source: str | None = None

    def run(self, num_processes: int, staging: Path) -> None:
        """Train in a process forked for it, which may use other variables and another patience than this one."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ |= self.variables(staging)
        job.shorten_lease()
        shards = self.folder.parent / "shards"
        job.run(self.url, num_processes=num_processes, source=self.source, shards=shards)

    def fingerprint(self) -> dict[str, Any]:
        """Read what the store holds, in a fork: this process must not start the threads of fsspec."""
        ours, theirs = multiprocessing.Pipe(duplex=False)
        reader = multiprocessing.get_context("fork").Process(target=self._send_fingerprint, args=(theirs,))
        reader.start()
        theirs.close()
        try:
            return ours.recv()
        finally:
            reader.join()
            ours.close()

    def _send_fingerprint(self, connection: Connection) -> None:
        os.environ |= self.variables(self.folder / "copies")
        connection.send(fingerprint(local_copy(self.url)))

    def variables(self, staging: Path) -> dict[str, str]:
        """Return the environment variables of processes that reach the store, with a staging folder as their disk."""
        return {STAGING: str(staging), job.SHORT_LEASE: "1", **environment(self.endpoint)}


class Neighborhood:
    """Objects of other runs and of users, beside a run in a bucket and among its objects."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket, self._name = bucket, name
        self.others = {
            f"{name}/notes.txt": b"mine", f"{name}/csv/mine.csv": b"a,b", f"{name}/manifest.json.old": b"{}",
            f"{name}/{OBJECTS}foreign": b"foreign", f"{name}/{OBJECTS}{'0' * 64}": b"zeros",
            f"{name}-2/{OBJECTS}x": b"sibling", f"{name}-2/manifest.json": b"{}", f"{name}1-b/{OBJECTS}x": b"similar",
            name: b"an object with the name of the folder", "manifest.json": b"of the parent",
            f"{OBJECTS}x": b"of the parent too",
        }  # fmt: skip
        for other, data in self.others.items():
            bucket.put(other, data)

    def faults(self) -> Iterator[str]:
        """Describe what is wrong with the objects of the bucket after the run is complete."""
        found = self._bucket.objects()
        for name, data in self.others.items():
            if found.get(name) != data:
                yield f"{name} of another was {'changed' if name in found else 'deleted'}"
        content = json.loads(found[f"{self._name}/manifest.json"])
        objects = [each["object"] for each in content["checkpoints"].values()]
        named = {f"{self._name}/{each}" for each in ["manifest.json", *content["logs"], *objects]}
        yield from (f"{name} is named by the manifest and missing" for name in sorted(named - found.keys()))
        yield from (f"{name} is left" for name in sorted(found.keys() - named - self.others.keys()))
        yield from (f"the upload of {name} is left" for name in self._bucket.uploads())


def drill(
    num_kills: int,
    num_faults: int,
    num_processes: int,
    *,
    folder: Path,
    server: str,
    faults: Proxy,
    seed: int = 0,
    source: str | None = None,
    expected: dict[str, Any] | None = None,
) -> StoreTally:
    """Kill runs `num_kills` times, and inject `num_faults` faults meanwhile, at least.

    Args:
        folder: an empty one, for the run that is not killed and for staging folders.
        server: URL of an S3 server.
        faults: the proxy in front of it.
        source: of the job; see :func:`tests.faults.job.run`.
        expected: fingerprint of the run that is not killed, which is trained by default.
    """
    tally, chance = StoreTally(num_processes, source), random.Random(seed)
    write_files(folder / "shards")
    expected = expected or whole_run(folder, num_processes, source)
    while tally.kills.total() < num_kills or tally.faults.total() < num_faults:
        tally.num_runs += 1
        name = f"run{tally.num_runs}"
        bucket = Bucket.create(f"drill-{next(_numbers)}", server)
        target = Target(bucket.url(name), folder / bucket.name, faults.url, source)
        target.folder.mkdir()
        neighborhood = Neighborhood(bucket, name)
        with struck_by(faults, tally, seed=chance.randrange(2**32)):
            struck = _complete(target, tally, chance)
        for key in differences(expected, target.fingerprint()):
            tally.different.append(f"{name}: {key} differs after {struck}")
        tally.others += [f"{name}: {each} after {struck}" for each in neighborhood.faults()]
        print(
            f"{target.url}: {len(struck)} kills; in all runs {tally.kills.total()} kills, {tally.faults.total()} "
            f"faults, {len(tally.different)} differences, {len(tally.others)} objects changed or left", file=sys.stderr,
        )  # fmt: skip
    return tally


@contextmanager
def struck_by(faults: Proxy, tally: StoreTally, *, seed: int) -> Iterator[None]:
    """Inject faults, and count them."""
    before = faults.counts
    faults.set(*FAULTS, seed=seed)
    yield
    faults.set()
    tally.faults += faults.counts - before


def _complete(target: Target, tally: StoreTally, chance: random.Random) -> list[Kill]:
    """Start a run and kill it until it completes, partly on machines with an empty disk; return the kills."""
    places = {**ALL_PLACES, **SHARD_PLACES} if tally.source == job.MESH else ALL_PLACES
    struck: list[Kill] = []
    num_disks = 0
    while True:
        if not struck or chance.random() < SHARE_OF_EMPTY_DISKS:
            num_disks += 1
            tally.num_empty_disks += 1
        kill = Kill.draw(chance, tally.num_processes, places=places, longest_s=5.0)
        run = partial(target.run, tally.num_processes, target.folder / f"disk-{num_disks}")
        if attempt(target.folder / "run", tally.num_processes, kill, tally, run=run):
            return struck
        struck.append(kill)


def table(tallies: Sequence[StoreTally]) -> str:
    """Return a Markdown table with a row for each place, each kind of fault, and the results."""
    kinds = [rule.kind for rule in FAULTS]
    rows: Mapping[str, list[str]] = {
        "attempts with an empty disk": [str(each.num_empty_disks) for each in tallies],
        **{f"fault: {kind}": [str(each.faults[kind]) for each in tallies] for kind in kinds},
        "all faults": [str(each.faults.total()) for each in tallies],
        CHANGED_OR_LEFT: [str(len(each.others)) for each in tallies],
    }
    lines = [f"| {head} | {' | '.join(cells)} |" for head, cells in rows.items()]
    return "\n".join([table_of_kills(tallies, places=ALL_PLACES), *lines])


def table_of_stored_streams(tallies: Sequence[StoreTally]) -> str:
    """Return a Markdown table with a row for each source of a stream."""
    ends = [f" {each.faults.total()} | {len(each.others)} |" for each in tallies]
    ends = [f" faults | {CHANGED_OR_LEFT} |", "---:|---:|", *ends]
    return "\n".join(map("".join, zip(table_of_streams(tallies).splitlines(), ends, strict=True)))


def main() -> None:
    """Drill, print a table, and exit with 1 if a run was different or touched what it should not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="for each number of processes")
    parser.add_argument("--faults", type=int, default=50, help="for each number of processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", action="store_true", help="train on streams, each with two data workers")
    parser.add_argument("--mesh", action="store_true", help="train a sharded model in four processes")
    parser.add_argument("--page", type=Path, help="also write the table to this page")
    options = parser.parse_args()
    import s3fs  # noqa: F401  # once, instead of in each fork

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes it started end

    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        server = running.enter_context(serving("tests.storage.s3_server"))
        faults = running.enter_context(proxy.running(server))
        run = partial(drill, options.kills, options.faults, folder=folder, server=server, faults=faults)
        sources = job.STREAMS if options.streams else [job.MESH if options.mesh else None]
        processes = [4] if options.mesh else options.processes
        tallies = [run(number, seed=options.seed, source=source) for source in sources for number in processes]
    found = table_of_stored_streams(tallies) if options.streams else table(tallies)
    section = "stream store drills" if options.streams else "mesh store drills" if options.mesh else "store drills"
    wrong = [line for tally in tallies for line in (*tally.different, *tally.others)]
    report(found, wrong, section, options.page)


if __name__ == "__main__":
    main()
