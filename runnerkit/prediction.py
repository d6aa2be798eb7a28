"""The loop of inference: a model, a loader, and predictions in the order of the data set."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler

from runnerkit.before_training import check_one_loader
from runnerkit.engine import IEngine
from runnerkit.sampling.sampler import ShardedBatchSampler, shortest_tail
from runnerkit.sampling.sharding import batches_of, distributed_sampler_of, share_of
from runnerkit.seeding import derive_seed, set_global_seed
from runnerkit.storage.checkpoint import find_checkpoint
from runnerkit.storage.prediction_file import check_path, prediction_file
from runnerkit.storage.rows import interleave, take_off
from runnerkit.storage.weights import load_weights
from runnerkit.types import as_dict, like

if TYPE_CHECKING:
    from runnerkit.train import Runner

logger = logging.getLogger(__name__)

KEY = "predict"  # of the loader, in messages

# What inference does not need, and what would otherwise travel to other processes: the training data above all.
_STAYS = (
    "criterion", "optimizer", "scheduler", "_loaders", "_given_criterion", "_given_optimizer", "_given_scheduler",
    "_given_engine", "_own_engine", "_given_loggers", "_evaluation", "_snapshot",
)  # fmt: skip


@dataclass
class Prediction:
    """What a runner is to predict.

    Attributes:
        loader: whole: the engine gives each process its share.
        seed: of everything random.
        resume: checkpoint or logdir to take the weights from.
        arguments: handed to `predict_batch`.
        as_rows: bring predictions to the CPU, checked to have a row for each sample.
    """

    loader: Iterable[Any]
    seed: int
    resume: str | Path | None
    arguments: dict[str, Any]
    as_rows: bool

    def check(self, engine: IEngine) -> bool:
        """Refuse, before any process is started, what can be told from here.

        Returns:
            Whether processes take turns by whole batches; else by samples, whose rows are to be interleaved.
        """
        check_one_loader(self.loader, reader="a prediction")
        if self.resume is not None:
            find_checkpoint(self.resume)
        share = share_of(self.share(engine))
        return not engine.is_ddp or getattr(share, "shares_whole_batches", False)

    def share(self, engine: IEngine) -> Any:
        """Return this process's share of the loader: of all samples, where its drop_last can be unset."""
        if engine.num_processes > 1 and distributed_sampler_of(self.loader) is not None:
            raise ValueError(
                "the loader has a DistributedSampler of its own, which repeats samples to fill all processes: "
                "leave it out, the engine gives each process its share"
            )
        loader = engine.prepare_loader(self.loader, key=KEY, training=False, seed=self.seed)
        share = share_of(loader)
        if hasattr(share, "drop_last"):
            share.drop_last = False
        return loader


def stream(runner: Runner, prediction: Prediction) -> Iterator[Any]:
    """Yield predictions, from the engine's processes, to each process that called."""
    by_batches = prediction.check(runner.engine)
    return _stream(runner.engine, _worker(runner), prediction, by_batches=by_batches)


def _stream(engine: IEngine, worker: Runner, prediction: Prediction, *, by_batches: bool) -> Iterator[Any]:
    with closing(engine.stream(partial(predict, worker, prediction=prediction))) as rounds:
        yield from in_order(rounds, by_batches=by_batches)


def write(runner: Runner, prediction: Prediction, path: Path) -> Path:
    """Write predictions to a file, from the engine's rank zero; return its path."""
    check_path(path)
    by_batches = prediction.check(runner.engine)
    job = partial(write_share, _worker(runner), prediction=prediction, path=path, by_batches=by_batches)
    runner.engine.launch(job)
    return path


def _worker(runner: Runner) -> Runner:
    """Return a copy of `runner` that can travel: with what the user keeps there, without what training left there."""
    if not runner.engine.is_ddp:
        return runner
    worker = copy.copy(runner)
    vars(worker).update(dict.fromkeys(_STAYS))
    worker._given_callbacks = {}
    worker._reset()
    return worker


def in_order(rounds: Iterable[list[Any]], *, by_batches: bool) -> Iterator[Any]:
    """Yield predictions in the loader's order, from those that the processes made at the same time.

    Args:
        rounds: what each process made, by rank.
        by_batches: as :meth:`Prediction.check` tells.
    """
    for made in rounds:
        yield from made if by_batches else [interleave(made)]


def predict(runner: Runner, prediction: Prediction) -> Generator[Any, None, None]:
    """Yield what `predict_batch` gives for each batch of this process's share; every rank must take all."""
    engine = runner.engine
    engine.setup()
    set_global_seed(prediction.seed)
    loader = prediction.share(engine)
    if engine.is_main_process:
        _warn_of_gaps(prediction.loader, share_of(loader))
        _warn_of_shuffling(prediction.loader)
    model = runner.model if runner.model is not None else runner.get_model("infer")
    models = {key: engine.prepare_model(each) for key, each in as_dict(model).items()}
    if prediction.resume is not None:
        load_weights(like(model, models), find_checkpoint(prediction.resume))
    models, _ = engine.prepare(models, {})
    if engine.rank:
        set_global_seed(derive_seed(prediction.seed, "rank", engine.rank))
    # The evaluation model: a process with no batch left is one that nobody waits for.
    runner.model = like(model, {key: engine.evaluation_model(each).eval() for key, each in models.items()})
    try:
        yield from _batches(runner, loader, prediction)
    finally:  # also when left half-way, so by no collective: the weights are as they were
        engine.precision.release()
        runner.model = like(model, {key: engine.unwrap(each) for key, each in models.items()})


def _batches(runner: Runner, loader: Any, prediction: Prediction) -> Iterator[Any]:
    engine = runner.engine
    if getattr(loader, "num_workers", 0):
        engine.settle()
    for number, batch in enumerate(batches_of(loader), start=1):
        try:
            with torch.no_grad(), engine.autocast():  # not around the yield: the caller has a gradient mode too
                made = runner.predict_batch(engine.to_device(batch), **prediction.arguments)
            if prediction.as_rows:
                made = take_off(made, batch, num_samples=_num_samples(share_of(loader), number))
        except Exception as error:
            error.add_note(f"in batch {number} of loader {KEY!r}, rank {engine.rank}")
            raise
        yield made


def _warn_of_gaps(loader: Any, share: Any) -> None:
    """Tell that a loader leaves samples out, where its share has no drop_last that could be unset."""
    said_by = (loader, getattr(loader, "batch_sampler", None))
    if not hasattr(share, "drop_last") and any(getattr(each, "drop_last", False) for each in said_by):
        logger.warning(
            "loader %r: its own sampler keeps drop_last=True, so the samples of a short last batch are not predicted; "
            "use drop_last=False",
            KEY,
        )


def _warn_of_shuffling(loader: Any) -> None:
    """Tell that predictions will not stand in the data set's order."""
    samplers = (getattr(each, "sampler", None) for each in (loader, getattr(loader, "batch_sampler", None)))
    if any(isinstance(each, RandomSampler) or getattr(each, "shuffle", False) is True for each in samplers):
        logger.warning(
            "loader %r shuffles: predictions come in its order, not in the data set's; use shuffle=False, or "
            "return what identifies a sample from predict_batch",
            KEY,
        )


def _num_samples(share: Any, number: int) -> int | None:
    """How many samples this process's batch `number`, from 1 on, has; None if its share cannot tell."""
    if not isinstance(share, ShardedBatchSampler):
        return None
    left = len(share.order) - (number - 1) * share.stride  # with this batch, of all processes
    is_last = left - share.stride < max(1, shortest_tail(share.stride, share.world_size))
    return len(range(share.rank, left if is_last else share.stride, share.world_size))


def write_share(runner: Runner, prediction: Prediction, path: Path, *, by_batches: bool) -> None:
    """Write the predictions of all processes to one file, on rank zero; every rank must call."""
    engine = runner.engine
    with closing(engine.gather_rounds(predict(runner, prediction))) as rounds:
        first = list(islice(rounds, 1))  # sets the engine up: only then the rank is known
        if engine.is_main_process:
            with prediction_file(path) as write_rows:
                for made in in_order(chain(first, rounds), by_batches=by_batches):
                    write_rows(made)
        else:
            deque(rounds, maxlen=0)
    engine.barrier()  # the file is there when anybody returns
