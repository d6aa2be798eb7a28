"""Checks of the user's input, before bad input costs an epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from difflib import get_close_matches
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from runnerkit.callback import EVENTS, ICallback, ICheckpointCallback, IListener, innermost
from runnerkit.errors import did_you_mean
from runnerkit.loop.loader_kinds import check_loader, ends_for_good
from runnerkit.monitor import Monitor
from runnerkit.sampling.feed import samplers_of
from runnerkit.sampling.loader_members import LoaderMembers, SamplerMembers
from runnerkit.sampling.sharding import count_batches, share_of

if TYPE_CHECKING:
    from runnerkit.engine import IEngine
    from runnerkit.sampling.streams.heads import StreamHead

logger = logging.getLogger(__name__)

_OF_TORCH = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_SAME_STREAM = (
    "Each process and worker has to read the whole stream, in the same order, and gets a share of it. If the stream "
    "is already split by rank, remove that: split_dataset_by_node, nodesplitter=wds.split_by_node, "
    "range(rank, n, world_size). If it is shuffled, fix the seed: .shuffle(1000, rng=random.Random(42)), or draw from "
    "the global functions of torch, numpy.random or random, which are seeded alike everywhere"
)


def check_loaders(loaders: Any) -> dict[str, Any]:
    """Raise unless `loaders` is a mapping of loaders, none of them empty.

    Raises:
        TypeError, ValueError: with the loader's key.
    """
    if not isinstance(loaders, Mapping):
        raise TypeError(f"loaders must be a dict such as {{'train': ..., 'valid': ...}}, got {type(loaders).__name__}")
    if not loaders:
        raise ValueError("loaders is empty; pass at least one, such as {'train': ..., 'valid': ...}")
    for key, loader in loaders.items():
        if not isinstance(key, str):
            raise TypeError(f"the keys of loaders must be str, such as 'train', got {key!r}")
        path = Path(key)
        if path.is_absolute() or ".." in path.parts or "\0" in str(path):
            raise ValueError(
                f"loader {key!r}: loggers name files after the key, and they would be outside the logdir; remove '..', "
                "a leading '/' and NUL, as in 'valid/easy'"
            )
        if str(key).endswith(".batch"):
            raise ValueError(
                f"loader {key!r}: <loader>.batch.csv is the table of training steps; give it another key, such as "
                f"{str(key).removesuffix('.batch') + '_batch'!r}"
            )
        check_loader(loader, f"loader {key!r}")
        if count_batches(loader) == 0:
            raise ValueError(f"loader {key!r} is empty: {why_empty(loader)}")
    return dict(loaders)


def check_trains(loaders: Iterable[str], *, has_optimizer: bool, stage: str = "train") -> str | None:
    """Return a warning if a run with an optimizer trains on no loader, otherwise None.

    Raises:
        ValueError: none is trained on, and a key looks as if it was meant to be.
    """
    keys = sorted(loaders)
    if stage.startswith("infer") or any(key.startswith("train") for key in keys):
        return None
    found = f"the loaders are {keys}, but only loaders whose key starts with 'train' are trained on"
    for key in keys:
        name = key.lower()
        is_near = name.startswith("t") and get_close_matches(name[:5], ["train"], n=1, cutoff=0.8)
        if is_near or name in ("fit", "learn"):
            raise ValueError(f"{found}: did you mean 'train' for {key!r}? (a stage 'infer' evaluates on any key)")
    if not has_optimizer:
        return None
    return f"{found}; to evaluate, call evaluate_loader or omit the optimizer"


def check_samplers(loaders: Mapping[str, Any], engine: IEngine) -> None:
    """Raise if a sampler was made for a longer data set than its loader's; warn if it was made for a shorter one.

    The training loader's sampler in the validation loader raises IndexError only after an epoch, or skips samples.

    Raises:
        ValueError: with the loader's key and both lengths.
    """
    for key, loader in loaders.items():
        dataset, sampler = LoaderMembers(loader).dataset, _innermost_sampler(loader)
        made_for = _length_made_for(sampler)
        if made_for is None or not isinstance(dataset, Sized) or made_for == len(dataset):
            continue
        found = (
            f"loader {key!r} has a data set of {len(dataset)} samples and a {type(sampler).__name__} made for "
            f"{made_for}: make the sampler from the loader's own data set"
        )
        is_guess = not isinstance(sampler, _OF_TORCH) and not _is_ours(sampler)  # what a custom class means by it
        if made_for > len(dataset) and not is_guess:
            raise ValueError(found)
        is_choice = isinstance(sampler, SubsetRandomSampler) or isinstance(SamplerMembers(sampler).data_source, range)
        if not engine.is_main_process or is_choice or (is_guess and made_for < len(dataset)):
            continue
        ends = (
            "it may read samples that do not exist" if is_guess else f"samples behind the first {made_for} are unread"
        )
        logger.warning("%s; %s", found, ends)


def _innermost_sampler(loader: Any) -> Any:
    sampler, batch_sampler, inner = samplers_of(loader)
    sampler = inner if isinstance(batch_sampler, BatchSampler) else sampler
    wrapped = SamplerMembers(sampler).sampler  # of a DistributedSamplerWrapper
    return sampler if wrapped is None else wrapped


def _length_made_for(sampler: Any) -> int | None:
    """Return the length of the data set that a sampler needs; None if its class does not tell."""
    if isinstance(sampler, SubsetRandomSampler):
        largest: Any = max(sampler.indices, default=None)
        return int(largest) + 1 if isinstance(largest, Integral | Tensor) else None
    if isinstance(sampler, WeightedRandomSampler):
        return len(sampler.weights)
    members = SamplerMembers(sampler)
    if _is_ours(sampler):
        return members.num_labels
    source = members.dataset if members.data_source is None else members.data_source
    return len(source) if isinstance(source, Sized) and not isinstance(source, str) else None


def _is_ours(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("runnerkit.")


def check_one_loader(loader: Any, *, reader: str) -> None:
    """Raise unless `loader` is one loader: the keys of several would be mistaken for batches.

    Raises:
        TypeError: with what to pass instead.
    """
    if isinstance(loader, Mapping):
        key = next(iter(loader), "valid")
        raise TypeError(
            f"{reader} takes one loader, got a {type(loader).__name__} of {list(loader)}: pass loaders[{key!r}]"
        )
    check_loader(loader, f"the loader of {reader}")


def why_empty(loader: Any, *, num_processes: int = 1) -> str:
    """Describe the sizes of an empty loader."""
    if ends_for_good(loader):
        return (
            f"it is a {type(loader).__name__}, which can be read once, and has ended, such as in an earlier epoch or "
            "validation: pass what it was made from, a DataLoader, or a list of its batches"
        )
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, Sized):
        return "it yields no batches"
    each = f" in each of {num_processes} processes" if num_processes > 1 else ""
    return f"{len(loader.dataset)} samples, batch_size={loader.batch_size}{each}, drop_last={loader.drop_last}"


def check_shares(loaders: Mapping[str, Any], engine: IEngine) -> None:
    """Raise if no rank has a batch of a loader, or if ranks have different numbers of training batches.

    Ranks with more batches would wait forever. The engine's shards are equal; those of a user's DistributedSampler or
    of loaders created per rank may not be.

    Raises:
        ValueError: with the numbers. Every rank must call: this gathers.
    """
    if engine.num_processes == 1:
        return
    mine = {key: count_batches(loader) for key, loader in loaders.items()}
    everyone = engine.gather_object(mine)
    for key, loader in loaders.items():
        counts = [each.get(key) for each in everyone]
        if set(counts) == {0}:
            raise ValueError(f"loader {key!r} is empty: {why_empty(loader, num_processes=engine.num_processes)}")
        if not key.startswith("train"):
            _warn_of_dropped(key, loader, engine)
        elif engine.is_ddp and len(set(counts)) > 1:
            raise ValueError(
                f"loader {key!r} has {counts} batches on the ranks, but training needs the same number on each; return "
                "the whole loader on every rank, which the engine shards evenly, or use drop_last=True"
            )


def compare_streams(batches: Iterator[Any], head: StreamHead, engine: IEngine, *, key: str) -> Iterator[Any]:
    """Return `batches` after fetching the first one, to check that all processes read the same stream.

    A stream that is split by rank would be split again; one whose order differs would repeat some samples.

    Args:
        head: has the fingerprints of the first samples that this process has read.
    Raises:
        ValueError: on every rank, with the loader's key. Every rank must call: this gathers.
    """
    from runnerkit.sampling.streams.heads import compare  # late, as few runs need it

    first: list[Any] = []
    error: Exception | None = None
    try:
        first = list(islice(batches, 1))
    except Exception as raised:  # other ranks are in the collective, or will be
        error = raised
    heads = engine.gather_object((error is None, head.read()))
    if error is not None:
        raise error
    found = compare([fingerprints for _, fingerprints in heads]) if all(is_read for is_read, _ in heads) else "same"
    if found == "different":
        raise ValueError(
            f"loader {key!r}: the first samples of its stream are not the same in every process. {_SAME_STREAM}"
        )
    if found == "only numbered alike" and engine.is_main_process:
        logger.warning(
            "loader %r: the first samples of its stream have the same numbers in every process, but other content. "
            "Ignore this if the content contains random noise. %s", key, _SAME_STREAM,
        )  # fmt: skip
    return chain(first, batches)


def compare_workers(batches: Iterator[Any], head: StreamHead, *, key: str) -> Iterator[Any]:
    """Yield `batches`; after the first one of each worker, warn if the workers of the only process read other samples.

    Args:
        head: has the fingerprints of the first samples that each worker has read.
    """
    from runnerkit.sampling.streams.heads import compare  # late, as few runs need it

    yield from islice(batches, len(head.fingerprints))
    if compare([head.read()]) == "different":
        logger.warning(
            "loader %r: the first samples of its stream are not the same in every worker, so some are missed and "
            "others repeated. Ignore this if they only contain random noise. %s", key, _SAME_STREAM,
        )  # fmt: skip
    yield from batches


def check_order_is_used(loader: Any, engine: IEngine, *, key: str) -> None:
    """Raise if, in one of several processes, a loader has yielded a batch without asking its sampler for indices.

    Raises:
        TypeError: with the loader's key: each process would read all samples.
    """
    if engine.num_processes > 1 and not share_of(loader).is_used:
        raise TypeError(
            f"loader {key!r}: the __iter__ of {type(loader).__name__} does not use its "
            "batch_sampler, which holds the samples of this process, so each process would read all samples; iterate "
            "over super().__iter__(), or give the loader a method shard(...) that returns a share (docs/loaders.md)"
        )


def _warn_of_dropped(key: str, loader: Any, engine: IEngine) -> None:
    share, dataset = share_of(loader), LoaderMembers(loader).dataset
    if not share.drop_last:
        return
    if engine.is_main_process and (not isinstance(dataset, Sized) or len(dataset) % share.stride):
        logger.warning(
            "loader %r: drop_last excludes a last batch of fewer than %d samples, %d in each of %d processes, from the "
            "metrics; a single process excludes fewer samples; without drop_last, none are excluded",
            key, share.stride, share.batch_size, engine.num_processes,
        )  # fmt: skip


def warn_of_length(key: str, engine: IEngine, *, num_batches: int, length: int | None) -> None:
    """Warn that a training loader gave another number of batches than its length."""
    if engine.is_main_process:
        logger.warning(
            "loader %r gave %d batches, but its length is %s: correct the __len__ of its data set or sampler, from "
            "which schedules are told the number of steps, or remove it", key, num_batches, length,
        )  # fmt: skip


def check_stages(stages: Any) -> list[str]:
    """Return the names of a runner's stages.

    Raises:
        TypeError, ValueError: they are not names, or there are none.
    """
    names = [] if stages is None else [*stages]
    if isinstance(stages, str) or not all(isinstance(each, str) for each in names):
        raise TypeError(f"stages must be a list of names, such as ['train'], got {stages!r}")
    if not names:
        raise ValueError(f"stages is {stages!r}, so the run would do nothing: return the names, such as ['train']")
    return names


def check_callbacks(callbacks: Mapping[str, ICallback], loaders: Mapping[str, Any]) -> None:
    """Raise unless all values are callbacks that read existing loaders and save to different folders.

    The monitors of callbacks learn the loaders, whose keys may contain "/".

    Raises:
        TypeError, ValueError: with the callback's key.
    """
    if not isinstance(callbacks, Mapping):
        raise TypeError(
            f"get_callbacks must return a dict such as {{'mine': MyCallback()}}, got {type(callbacks).__name__}"
        )
    savers: dict[Path, str] = {}
    for key, callback in callbacks.items():
        if isinstance(callback, type):
            raise TypeError(
                f"callback {key!r} is the class {callback.__name__}; pass an instance of it: {callback.__name__}(...)"
            )
        if not isinstance(callback, ICallback):
            raise TypeError(f"callback {key!r} is a {type(callback).__name__}; expected a runnerkit Callback")
        inner: Any = innermost(callback)
        if isinstance(monitor := getattr(inner, "monitor", None), Monitor) and monitor != monitor.among(loaders):
            inner.monitor = monitor.among(loaders)
            moved = [inner.monitor.pair if pair == monitor.pair else pair for pair in inner.requires]
            inner.requires = callback.requires = tuple(moved)
        for loader_key, _ in callback.requires:
            check_loader_key(loader_key, loaders, reader=f"{type(callback).__name__} ({key!r})")
        if isinstance(inner, ICheckpointCallback) and inner.logdir is not None:
            other = savers.setdefault(Path(inner.logdir).resolve(), key)
            if other != key:
                raise ValueError(
                    f"callbacks {other!r} and {key!r} would overwrite each other's files in {inner.logdir}: give one "
                    "another logdir, such as a folder inside it"
                )


def warn_of_misspelt(listeners: Iterable[IListener], engine: IEngine) -> None:
    """Warn about methods whose name resembles that of an event: they are never called."""
    if not engine.is_main_process:
        return
    for kind in dict.fromkeys(type(each) for each in listeners):
        names = [name for name in dir(kind) if name.startswith("on_") and name not in EVENTS]
        for name in names:
            nearest = get_close_matches(name, EVENTS, n=1, cutoff=0.8)  # 1 is the same name
            if nearest and callable(getattr(kind, name)):
                logger.warning("%s.%s is never called; did you mean the event %s?", kind.__name__, name, nearest[0])


def check_loader_key(loader_key: str, loaders: Mapping[str, Any], *, reader: str) -> None:
    """Raise if a loader does not exist.

    Raises:
        ValueError: with the names of those that do.
    """
    if loader_key not in loaders:
        found = f"{reader} reads loader {loader_key!r}; the loaders are {sorted(loaders)}"
        raise ValueError(found + did_you_mean(loader_key, loaders))
