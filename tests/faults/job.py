"""The run that is killed, with every kind of state that a resume must restore."""

import os
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from runnerkit import dl, utils
from runnerkit.storage.remote import lease
from runnerkit.storage.remote.urls import plain_path
from tests.data.stream_sources import Divisible, Numbers, files, hugging_face, number_of, webdataset
from tests.tiny import classification, loader, mlp, train

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 48, 4, 6


class Augmented(Dataset[Any]):
    """A data set whose samples draw from all three random generators."""

    def __init__(self) -> None:
        self.data = classification(NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, target = self.data[index]
        return features * (1 + 0.2 * random.random()) + 0.1 * torch.randn(6) * float(np.random.rand()), target


def engine(num_processes: int, source: str | None) -> dl.IEngine:
    if source == MESH:
        # Advice not to change a unit's output in place, if its last layer is divided.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        return dl.FullyShardedDataParallelEngine(
            num_processes, device="cpu", timeout_s=30, init="meta", shard_modules=[nn.Linear], tensor_parallel=2,
            plan={"0": "colwise", "2": "random_apart", "3": "rowwise"},
        )  # fmt: skip
    if num_processes == 1:
        return dl.AMPEngine("cpu", dtype=torch.bfloat16)
    return dl.DistributedDataParallelAMPEngine(num_processes, device="cpu", dtype=torch.bfloat16, timeout_s=30)


def labelled(sample: Any) -> tuple[Tensor, Tensor]:
    """Return the features and the target of a stream's sample, with random numbers from all generators."""
    number = number_of(sample)
    features = torch.linspace(0, 1, 6) * (number % 7) * (1 + 0.2 * random.random())
    return features + 0.1 * torch.randn(6) * float(np.random.rand()), torch.tensor(number % 3)


def paired(sample: Any) -> dict[str, Any]:
    return {"pair": labelled(sample)}


def collate(samples: list[Any]) -> Any:
    return default_collate([each["pair"] if isinstance(each, dict) else each for each in samples])


# By the name of a source of streams, what makes its data set of a folder of shards.
STREAMS: dict[str, Callable[[Path], Any]] = {
    "ShardedFiles": partial(files, change=labelled),
    "Hugging Face": partial(hugging_face, change=paired),
    "WebDataset": partial(webdataset, change=labelled),
    "IterableDataset with shards": partial(Divisible, change=labelled),
    "the same, without epoch_steps": partial(Divisible, change=labelled),
    "any other IterableDataset": partial(Numbers, change=labelled),
}
FINITE = "the same, without epoch_steps"
# Map-style data and a model that no process holds whole; the processes divide samples in two and weights in two.
MESH = "a mesh of 2 x 2"
SHORT_LEASE = "DRILL_SHORT_LEASE"  # environment variable of processes that call `shorten_lease`


def shorten_lease() -> None:
    """Wait 1.5 s, not a minute, for a killed run whose logdir is in a store, on a machine with an empty disk."""
    lease.BEAT_S, lease.TAKEOVER_S = 0.2, 1.5


if SHORT_LEASE in os.environ:  # ranks that a launcher starts import this module with the data set
    shorten_lease()


def run(logdir: Path | str, *, num_processes: int, source: str | None = None, shards: Path | None = None) -> None:
    """Train a small model or resume it; batches and epochs are logged, and a thread saves every third step.

    Args:
        logdir: of the run, also a URL.
        num_processes: of the job.
        source: key of `STREAMS`; None or `MESH` is a map-style data set.
        shards: folder of a stream's files; default: "shards" beside a local logdir.
    """
    torch.manual_seed(0)
    with utils.parameters_on_meta() if source == MESH else nullcontext():
        # The last batch of FINITE may have one sample.
        model = mlp(dropout=0.3, batch_norm=source not in (FINITE, MESH))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    epoch_steps = NUM_SAMPLES // (BATCH_SIZE * (num_processes // 2 if source == MESH else num_processes))
    most_steps = NUM_EPOCHS * (100 if source == FINITE else epoch_steps)
    if source in (None, MESH):
        train_loader = DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, num_workers=1)
    else:
        stream = STREAMS[source](shards or plain_path(logdir).parent / "shards")
        train_loader = DataLoader(stream, batch_size=BATCH_SIZE, num_workers=2, collate_fn=collate)
    early = dl.EarlyStoppingCallback(2, monitor="valid/loss", mode="min", min_delta=0.05)
    saving = {"mode": "min", "content": "runner", "every_steps": 3, "asynchronous": True}
    train(
        model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=most_steps),
        loaders={"train": train_loader, "valid": loader(21, 4)},
        callbacks={
            "accuracy": dl.AccuracyCallback("logits", "targets"),
            "scheduler": dl.SchedulerCallback(interval="step"),
            "stop": early,
            "checkpoint": dl.CheckpointCallback(logdir, monitor="valid/loss", **saving),
        },
        num_epochs=NUM_EPOCHS,
        epoch_steps=None if source in (None, MESH, FINITE) else epoch_steps,
        loggers={
            "csv": dl.CSVLogger(logdir, log_batch_metrics=True),
            "jsonl": dl.JSONLLogger(logdir, log_batch_metrics=True),
            "tensorboard": dl.TensorboardLogger(logdir, log_batch_metrics=True),
        },
        log_every=2,
        logdir=logdir,
        resume="auto",
        engine=engine(num_processes, source),
    )
