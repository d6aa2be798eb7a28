"""Folders of pretrained models as Hugging Face's libraries read them: ``.safetensors`` files, and their index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from runnerkit.checkpoints.safetensors_file import SUFFIX, read_safetensors
from runnerkit.storage.atomic_file import new_file, sync
from runnerkit.support.platform import replace
from runnerkit.types import StateDict

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # if there are several files of weights
_INDEX_SUFFIX = ".safetensors.index.json"


def pretrained_weights(folder: Path) -> Path | None:
    """Return the file of weights, or the index of several, in a pretrained model's folder; None for other folders.

    A logdir is not one, even if weights were exported to it.
    """
    if (folder / "checkpoints").is_dir() or (folder / "index.json").is_file():
        return None
    return next((path for path in (folder / WEIGHTS, folder / INDEX) if path.is_file()), None)


def is_index(path: Path) -> bool:
    """Return whether `path` is the index of several ``.safetensors`` files.

    >>> is_index(Path("bert/model.safetensors.index.json"))
    True
    """
    return path.name.endswith(_INDEX_SUFFIX)


def read_indexed(path: Path) -> StateDict:
    """Map the weights in the files that an index names into memory, where they are read when they are used.

    Raises:
        FileNotFoundError: there is no index.
        ValueError: the index or a file that it names is damaged, or a file or a weight is missing.
        ImportError: the package safetensors is missing.
    """
    try:
        files: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        shards = sorted(set(files.values()))
        is_wrong = any(Path(name).name != name or not name.endswith(SUFFIX) for name in shards)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of {SUFFIX} files ({type(error).__name__}: {error})") from error
    if is_wrong:
        raise ValueError(f"{path} must name {SUFFIX} files in its own folder, but names {', '.join(shards)}")
    if missing := [name for name in shards if not (path.parent / name).is_file()]:
        raise ValueError(f"{path} names {len(shards)} files, of which these are missing: {', '.join(missing)}")
    weights: StateDict = {}
    for name in shards:
        weights |= read_safetensors(path.parent / name)
    if missing := sorted(files.keys() - weights.keys()):
        raise ValueError(f"{path} names {len(missing)} weights that are not in its files, the first is {missing[0]}")
    return weights


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Provide a folder for the body to fill, then move its files to `out`, in place of an earlier export.

    A kill leaves the earlier export, the new one, or none that can be read, but never files of both.
    """
    is_new = not out.exists()
    with new_file(out / CONFIG):
        pass
    try:
        with TemporaryDirectory(prefix=".export-", dir=out) as folder:
            yield Path(folder)
            for earlier in (out / INDEX, out / WEIGHTS, *out.glob("model-*-of-*.safetensors")):
                earlier.unlink(missing_ok=True)
            for file in sorted(Path(folder).iterdir(), key=lambda path: path.name in (INDEX, WEIGHTS)):
                replace(file, out / file.name)
            sync(out)
    except BaseException:
        if is_new:
            with suppress(OSError):
                out.rmdir()  # removes only an empty folder
        raise
