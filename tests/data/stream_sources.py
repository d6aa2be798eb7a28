"""Streams of the numbers 0 to 95 by every kind of source."""

import json
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from runnerkit import dl

SIZES = [13, 5, 7, 16, 3, 9, 11, 4, 6, 2, 9, 11]
NUM_SAMPLES = sum(SIZES)
FIRST = list(accumulate([0, *SIZES]))
LANES = (4, 2)

Change: TypeAlias = Callable[[Any], dict[str, Any]]  # of a sample


def number_of(sample: Any) -> int:
    """Return the number in a sample of any source."""
    return int(sample["n"] if "n" in sample else sample["txt"])


def noted(sample: Any, log: Path) -> dict[str, Any]:
    """Return a sample's number, after appending it to `log`, also in a worker."""
    with open(log, "a") as file:
        file.write(f"{number_of(sample)}\n")
    return {"n": number_of(sample)}


def augmented(sample: Any) -> dict[str, Any]:
    """Return a sample's number and a random one."""
    return {"n": number_of(sample), "random": random.random()}


def numbers_of(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the samples of a file of JSON lines."""
    for line in path.read_text().splitlines()[start:]:
        yield json.loads(line)


def write_files(folder: Path) -> None:
    """Write the numbers as JSON lines and as tar archives, in 12 files of each."""
    folder.mkdir(exist_ok=True)
    for index, size in enumerate(SIZES):
        numbers = range(FIRST[index], FIRST[index] + size)
        (folder / f"{index:02}.jsonl").write_text("\n".join(json.dumps({"n": number}) for number in numbers))
        with tarfile.open(folder / f"{index:02}.tar", "w") as archive:
            for number in numbers:
                member, content = tarfile.TarInfo(f"{number:04}.txt"), str(number).encode()
                member.size = len(content)
                archive.addfile(member, BytesIO(content))


class Numbers(IterableDataset[Any]):
    """A stream that cannot be divided."""

    def __init__(self, folder: Path, change: Change) -> None:
        self.paths, self.change = sorted(folder.glob("*.jsonl")), change

    def __iter__(self) -> Iterator[Any]:
        for path in self.paths:
            yield from self.of(path)

    def of(self, path: Path) -> Iterator[Any]:
        return map(self.change, numbers_of(path))


class Divisible(Numbers):
    """A stream with shards."""

    num_shards = len(SIZES)

    def shard(self, num_shards: int, index: int) -> Iterator[Any]:
        assert num_shards == self.num_shards
        return self.of(self.paths[index])


def files(folder: Path, change: Change) -> Any:
    paths = sorted(folder.glob("*.jsonl"))
    return dl.ShardedFiles(paths, numbers_of, sizes=SIZES, transform=change, shuffle=4, lanes=LANES)


def hugging_face(folder: Path, change: Change, *, is_shuffled: bool = True) -> Any:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import datasets

    datasets.disable_progress_bars()
    paths = [str(path) for path in sorted(folder.glob("*.jsonl"))]
    cache = str(folder / "cache")
    stream = datasets.load_dataset("json", data_files=paths, split="train", streaming=True, cache_dir=cache)
    return (stream.shuffle(seed=3, buffer_size=4) if is_shuffled else stream).map(change)


def webdataset(folder: Path, change: Change, **options: Any) -> Any:
    import webdataset as wds

    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    pipeline = wds.WebDataset(urls, **{"shardshuffle": 100, **options})
    return pipeline.shuffle(5).decode().map(change)


def stateful(dataset: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, **options)


def web_loader(dataset: Any, **options: Any) -> Any:
    import webdataset as wds

    return wds.WebLoader(dataset, **options)


# Data set and loader by name.
SOURCES: dict[str, tuple[Callable[[Path, Change], Any], Callable[..., Any]]] = {
    "ShardedFiles": (files, DataLoader),
    "Hugging Face, shuffled": (hugging_face, DataLoader),
    "Hugging Face in a StatefulDataLoader": (hugging_face, stateful),
    "WebDataset, shuffled": (webdataset, DataLoader),
    "WebDataset in its WebLoader": (webdataset, web_loader),
    "IterableDataset with shards": (Divisible, DataLoader),
    "any other IterableDataset": (Numbers, DataLoader),
}
