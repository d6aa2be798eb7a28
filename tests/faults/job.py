"""The run that is killed, with every kind of state that a resume must restore."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from runnerkit import dl
from tests.tiny import classification, loader, mlp

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


def engine(num_processes: int) -> dl.IEngine:
    if num_processes == 1:
        return dl.AMPEngine("cpu", dtype=torch.bfloat16)
    return dl.DistributedDataParallelAMPEngine(num_processes, device="cpu", dtype=torch.bfloat16, timeout_s=30)


def run(logdir: Path, *, num_processes: int) -> None:
    """Train a small model or resume it; batches and epochs are logged, and a thread saves every third step."""
    torch.manual_seed(0)
    model = mlp(dropout=0.3, batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = NUM_EPOCHS * NUM_SAMPLES // (BATCH_SIZE * num_processes)
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps),
        loaders={
            "train": DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, num_workers=1),
            "valid": loader(21, 4),
        },
        callbacks={
            "accuracy": dl.AccuracyCallback("logits", "targets"),
            "scheduler": dl.SchedulerCallback(mode="batch"),
            "stop": dl.EarlyStoppingCallback(2, loader_key="valid", metric_key="loss", minimize=True, min_delta=0.05),
            "checkpoint": dl.CheckpointCallback(
                logdir, "valid", "loss", minimize=True, mode="runner", every_steps=3, asynchronous=True
            ),
        },
        num_epochs=NUM_EPOCHS,
        loggers={
            "console": None,
            "csv": dl.CSVLogger(logdir, log_batch_metrics=True),
            "tensorboard": dl.TensorboardLogger(logdir, log_batch_metrics=True),
        },
        log_every=2,
        logdir=logdir,
        resume="auto",
        engine=engine(num_processes),
        verbose=False,
    )
