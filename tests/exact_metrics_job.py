"""One experiment with the same global batch on 1, 2, 3 and 4 processes, which are started only once."""

import os
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.engines.launch.spawn import spawn
from tests.free_port import free_port
from tests.tiny import sgd, train

GLOBAL_BATCH, NUM_TRAIN, NUM_VALID, NUM_EPOCHS = 12, 246, 151, 3


def digits():
    """Return real images: 246 for training and 151 for evaluation, which 2, 3 and 4 processes cannot split evenly."""
    from sklearn.datasets import load_digits  # not imported in the four processes: it takes a second

    features, targets = load_digits(return_X_y=True)
    data = torch.tensor(features, dtype=torch.float32) / 16, torch.tensor(targets)
    parts = slice(NUM_TRAIN), slice(NUM_TRAIN, NUM_TRAIN + NUM_VALID)
    return [TensorDataset(*(each[part] for each in data)) for part in parts]


def run(engine, train_set, valid_set):
    """Train; return {epoch: {loader: metrics}}."""
    batch_size = GLOBAL_BATCH // engine.num_processes
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    loaders = {
        "train": DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True),
        "valid": DataLoader(valid_set, batch_size=batch_size),
    }
    callbacks = [dl.AccuracyCallback("logits", "targets", topk=(1, 3))]
    options = {"optimizer": sgd(model, lr=0.05), "loaders": loaders, "num_epochs": NUM_EPOCHS}
    return train(model, callbacks=callbacks, engine=engine, **options).experiment_metrics


def _train_on_each(ports, data):
    rank = int(os.environ["RANK"])
    results = {}
    for num_processes, port in ports.items():
        if rank < num_processes:
            size = str(num_processes)
            os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
            results[num_processes] = run(dl.DistributedDataParallelEngine(num_processes, device="cpu"), *data)
    return results


def train_on_each(num_processes):
    """Train once for each number of processes; return {number of processes: metrics}."""
    ports = {count: str(free_port()) for count in num_processes}
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": next(iter(ports.values()))}
    return spawn(partial(_train_on_each, ports, digits()), num_processes=max(num_processes), variables=variables)
