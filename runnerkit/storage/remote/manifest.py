"""``manifest.json``: what a logdir in a store holds. Names in it are relative to the URL, with slashes."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

FILE = "manifest.json"
FORMAT_VERSION = 1
LEASE = "lease.json"
CHECKPOINTS = "checkpoints"
OBJECTS = f"{CHECKPOINTS}/objects"


@dataclass(frozen=True)
class Entry:
    """The content of one file of a checkpoint.

    Attributes:
        object: name of the object: the checksum, and for a shard also the checkpoint that it belongs to.
        sha256: the checksum.
    """

    object: str
    sha256: str

    @classmethod
    def of(cls, sha256: str, *, shard_of: str | None = None) -> Entry:
        """Return the entry for a content.

        Args:
            shard_of: the checkpoint, if the process that made the shard uploads it.
        """
        return cls(f"{OBJECTS}/{sha256}" if shard_of is None else f"{OBJECTS}/{sha256}-{shard_of}", sha256)


@dataclass(frozen=True)
class Manifest:
    """The files of a logdir.

    Attributes:
        run: the attempt that wrote it.
        checkpoints: files of checkpoints, by name.
        links: names of checkpoints that are another name in the same folder, as "checkpoints/last": "model.0003".
        logs: names of all other files, which are also the names of their objects.
    """

    run: str = ""
    checkpoints: dict[str, Entry] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)

    @property
    def objects(self) -> set[str]:
        """Names of the objects of checkpoints."""
        return {entry.object for entry in self.checkpoints.values()}

    @property
    def names(self) -> set[str]:
        """Names of all objects, without those of the manifest itself and the lease."""
        return self.objects | set(self.logs)

    def to_json(self) -> bytes:
        """Serialize.

        >>> Manifest.from_json(Manifest(logs=["csv/train.csv"]).to_json(), "s3://bucket/run").logs
        ['csv/train.csv']
        """
        return (json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, url: str) -> Manifest:
        """Read.

        Raises:
            ValueError: it is damaged, names something outside of the logdir, or a newer runnerkit wrote it.
        """
        try:
            content: dict[str, Any] = json.loads(data)
            is_newer = content["format_version"] > FORMAT_VERSION
            manifest = cls() if is_newer else cls(
                str(content["run"]),
                {_inside(name): _entry(**entry) for name, entry in content["checkpoints"].items()},
                {_inside(name): _target(target) for name, target in content["links"].items()},
                [_log(name) for name in content["logs"]],
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{url}/{FILE} is damaged ({type(error).__name__}: {error})") from error
        if is_newer:
            raise ValueError(f"{url}/{FILE} was written by a newer runnerkit: upgrade it")
        return manifest


def is_log(name: str) -> bool:
    """Return whether a file of this name is uploaded under it; others have a meaning in a store."""
    return name not in (FILE, LEASE) and PurePosixPath(name).parts[0] != CHECKPOINTS


def is_object(name: str) -> bool:
    """Return whether an object of this name is the content of a file of a checkpoint."""
    return bool(re.fullmatch(rf"{OBJECTS}/[0-9a-f]{{64}}(-[\w.-]+)?", name))


def is_run_file(name: Any) -> bool:
    """Return whether a run may have written an object of this name, so that the next one may delete it."""
    try:
        return is_object(_inside(name)) or is_log(name)
    except (ValueError, TypeError, AttributeError):
        return False


def _inside(name: Any) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or (os.name == "nt" and set(name) & set("\\:")):
        raise ValueError(f"not the name of a file in a logdir: {name!r}")
    return str(name)


def _log(name: Any) -> str:
    if not is_log(_inside(name)):
        raise ValueError(f"not the name of a log: {name!r}")
    return str(name)


def _target(name: Any) -> str:
    if len(PurePosixPath(_inside(name)).parts) != 1:
        raise ValueError(f"not a name in the same folder: {name!r}")
    return str(name)


def _entry(**fields: Any) -> Entry:
    entry = Entry(**fields)
    if not re.fullmatch("[0-9a-f]{64}", entry.sha256):
        raise ValueError(f"not a checksum: {entry.sha256!r}")
    if not is_object(entry.object) or not entry.object.startswith(f"{OBJECTS}/{entry.sha256}"):
        raise ValueError(f"not an object of a checkpoint: {entry.object!r}")
    return entry
