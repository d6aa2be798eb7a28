"""Inference: a model, a loader, and predictions in the order of the data set."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from runnerkit.checkpoints.folder import find_checkpoint
from runnerkit.checkpoints.weights import load_weights
from runnerkit.engine import IEngine
from runnerkit.loop.checks import check_one_loader
from runnerkit.loop.hooks import call_hook
from runnerkit.passes.restored_state import isolated, modules_in
from runnerkit.sampling.feed import samplers_of
from runnerkit.sampling.indexed.sampler import ShardedBatchSampler
from runnerkit.sampling.loader_members import DatasetMembers, LoaderMembers, SamplerMembers
from runnerkit.sampling.orders import PREDICT
from runnerkit.sampling.sharding import batches_of, distributed_sampler_of, share_of
from runnerkit.sampling.share import LoaderShare
from runnerkit.seeding.generators import derive_seed, set_global_seed
from runnerkit.storage.claims import written
from runnerkit.storage.prediction_file import check_path, prediction_file
from runnerkit.storage.prediction_frame import check_index, prediction_frame
from runnerkit.storage.rows import interleave, to_cpu_rows
from runnerkit.types import Batch, Model, as_dict, like

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)


class Predictor(Protocol):
    """The part of a runner that inference needs."""

    engine: IEngine
    model: Any
    current_run: Any

    def get_model(self, stage: str) -> Model:
        """Return the model, or several by key."""
        raise NotImplementedError

    def predict_batch(self, batch: Batch, **kwargs: Any) -> Any:
        """Run the model on a batch."""


@dataclass
class Prediction:
    """An inference run: its input, and how the processes share it. The runner is passed in.

    Attributes:
        loader: not sharded; the engine gives each process its share.
        seed: for all random numbers.
        resume: checkpoint or logdir to take the weights from.
        arguments: passed to `predict_batch`.
        as_rows: move predictions to the CPU and check that they have one row per sample.
    """

    loader: Iterable[Any]
    seed: int
    resume: str | Path | None
    arguments: dict[str, Any]
    as_rows: bool

    def check(self, engine: IEngine) -> bool:
        """Validate the input before any process starts.

        Returns:
            Whether processes take turns by whole batches; otherwise by samples, whose rows are interleaved.
        """
        check_one_loader(self.loader, reader="a prediction")
        if engine.never_whole:
            raise ValueError(
                f"{type(engine).__name__}(init='meta') does not predict: load the weights with "
                "runner.load(logdir) where they fit, or score them by evaluate_loader(loader, resume=logdir)"
            )
        if self.resume is not None:
            find_checkpoint(self.resume)
        share = share_of(self.share(engine))
        return not engine.is_ddp or share.shares_whole_batches

    def share(self, engine: IEngine) -> Any:
        """Return this process's share of the loader, with drop_last unset if possible."""
        if engine.num_processes > 1 and distributed_sampler_of(self.loader) is not None:
            raise ValueError(
                "the loader has its own DistributedSampler, which repeats samples to fill all processes: "
                "remove it, because the engine gives each process its share"
            )
        loader = engine.prepare_loader(self.loader, key=PREDICT, training=False, seed=self.seed)
        share = share_of(loader)
        if share.drop_last:
            share.drop_last = False
        return loader

    def stream(self, runner: Predictor) -> Iterator[Any]:
        """Yield the predictions of the engine's processes in each calling process."""
        by_batches = self.check(runner.engine)
        return self._stream(runner, by_batches=by_batches)

    def _stream(self, runner: Predictor, *, by_batches: bool) -> Iterator[Any]:
        with closing(runner.engine.stream(partial(predict, runner, prediction=self))) as rounds:
            yield from in_order(rounds, by_batches=by_batches, every=runner.engine.tensor_parallel)

    def write(self, runner: Predictor, path: Path) -> Path:
        """Write predictions to a file, or a URL, from the engine's rank zero; return `path`."""
        check_path(path)
        by_batches = self.check(runner.engine)
        runner.engine.launch(partial(write_share, runner, prediction=self, path=path, by_batches=by_batches))
        return path

    def of_process(self, runner: Predictor) -> Generator[Any, None, None]:
        """Yield this process's predictions, as :func:`predict`, which restores modes and generators in between."""
        engine = runner.engine
        engine.setup()
        set_global_seed(self.seed)
        loader = self.share(engine)
        if engine.is_main_process:
            _warn_about_gaps(self.loader, share_of(loader))
            _warn_of_shuffling(self.loader)
        model = runner.model
        models = {key: engine.prepare_model(each) for key, each in as_dict(model).items()}
        if self.resume is not None:
            load_weights(like(model, models), find_checkpoint(self.resume))
        models, _ = engine.prepare(models, {})
        if rank := engine.data_parallel.rank:
            set_global_seed(derive_seed(self.seed, "rank", rank))
        # The evaluation model does not wait for processes that ran out of batches.
        runner.model = like(model, {key: engine.evaluation_model(each).eval() for key, each in models.items()})
        try:
            yield from self._batches(runner, loader)
        finally:  # no collectives, as the generator may be closed early; the weights did not change
            if engine.in_use:
                for each in models.values():
                    engine.training_model(each)
            else:
                engine.precision.release()
                runner.model = like(model, {key: engine.unwrap(each) for key, each in models.items()})

    def _batches(self, runner: Predictor, loader: Any) -> Iterator[Any]:
        engine = runner.engine
        if LoaderMembers(loader).num_workers:
            engine.settle()
        for number, batch in enumerate(batches_of(loader), start=1):
            try:
                with torch.no_grad(), engine.autocast():  # not around the yield: the caller has its own gradient mode
                    made = runner.predict_batch(engine.to_device(batch), **self.arguments)
                if self.as_rows:
                    made = to_cpu_rows(made, batch, num_samples=_num_samples(share_of(loader), number))
            except Exception as error:
                error.add_note(f"in batch {number} of loader {PREDICT!r}, rank {engine.rank}")
                raise
            yield made


# What the processes of an engine run: functions with named arguments, of which an error names what cannot be sent.


def predict(runner: Predictor, prediction: Prediction) -> Generator[Any, None, None]:
    """Yield the result of `predict_batch` for each batch of this process's share; every rank must consume all.

    Between batches the generators of this process, and the modes of the runner's modules, are those of the caller.
    """
    if runner.model is None:
        runner.model = call_hook(runner.get_model, stage="infer")
    weights = runner.current_run.stage.evaluation_weights
    return isolated(prediction.of_process(runner), modules_in(vars(runner).values()), weights)


def write_share(runner: Predictor, prediction: Prediction, path: Path, *, by_batches: bool) -> None:
    """Write the predictions of all processes to one file, on rank zero; every rank must call."""
    engine = runner.engine
    with closing(engine.gather_rounds(predict(runner, prediction))) as rounds:
        first = list(islice(rounds, 1))  # sets up the engine, after which the rank is known
        if engine.is_main_process:
            with written(path) as local, prediction_file(local) as write_rows:
                for made in in_order(chain(first, rounds), by_batches=by_batches, every=engine.tensor_parallel):
                    write_rows(made)
        else:
            deque(rounds, maxlen=0)
    engine.barrier()  # the file exists when any rank returns


def as_frame(predictions: Iterator[Any], loader: Any, *, index: Any) -> pd.DataFrame:
    """Collect the results of :meth:`Prediction.stream` in a frame.

    Raises:
        ValueError: `index` cannot label the rows, because the loader shuffles or has another number of samples.
    """
    check_index(index)
    if index is not None and _is_shuffled(loader):
        raise ValueError(
            "predict_frame: the loader shuffles, so index= would label other rows: use shuffle=False (of data with "
            "lanes, lanes=(1, 1)), or return an identifier of each sample from predict_batch"
        )
    return prediction_frame(predictions, index=index)


def in_order(rounds: Iterable[list[Any]], *, by_batches: bool, every: int = 1) -> Iterator[Any]:
    """Yield predictions in the order of the loader.

    Args:
        rounds: predictions that the processes made at the same time, by rank.
        by_batches: the result of :meth:`Prediction.check`.
        every: number of processes, in a row, that predict the same.
    """
    for made in rounds:
        yield from made[::every] if by_batches else [interleave(made[::every])]


def _warn_about_gaps(loader: Any, share: LoaderShare) -> None:
    """Warn if a loader drops samples because drop_last cannot be unset in its share."""
    batch_sampler = samplers_of(loader)[1]
    if share.drop_last is None and (LoaderMembers(loader).drop_last or SamplerMembers(batch_sampler).drop_last):
        logger.warning(
            "loader %r: its sampler keeps drop_last=True, so the samples of a short last batch are not predicted; "
            "use drop_last=False",
            PREDICT,
        )


def _warn_of_shuffling(loader: Any) -> None:
    """Warn that predictions will not be in the order of the data set."""
    if _is_shuffled(loader):
        logger.warning(
            "loader %r shuffles: predictions come in its order, not in the data set's; use shuffle=False (of data "
            "with lanes, lanes=(1, 1)), or return an identifier of each sample from predict_batch",
            PREDICT,
        )


def _is_shuffled(loader: Any) -> bool:
    sampler, _, inner = samplers_of(loader)
    random = RandomSampler | SubsetRandomSampler | WeightedRandomSampler
    shuffles = any(isinstance(each, random) or SamplerMembers(each).shuffle is True for each in (sampler, inner))
    dataset = LoaderMembers(loader).dataset
    lanes = DatasetMembers(dataset).lanes if isinstance(dataset, IterableDataset) else None
    has_lanes = isinstance(lanes, tuple | list) and tuple(lanes) != (1, 1)
    return shuffles or has_lanes or not DatasetMembers(dataset).keeps_order


def _num_samples(share: LoaderShare, number: int) -> int | None:
    """Return the number of samples in this process's batch `number`, counted from 1; None if it is unknown."""
    if not isinstance(share, ShardedBatchSampler):
        return None
    left = len(share.order) - (number - 1) * share.stride  # of all processes, including this batch
    return len(range(share.rank, min(left, share.stride), share.world_size))
