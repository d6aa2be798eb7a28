"""Train on a Ray cluster with Ray Train: python ray_train.py NUM_PROCESSES MAX_RESTARTS"""

import os
import sys
import tempfile

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader

from model import make_data, make_model, make_optimizer


def train_loop():
    context = ray.train.get_context()
    model = make_model()
    trained = prepare_model(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = make_optimizer(trained.parameters())
    loader = prepare_data_loader(DataLoader(make_data(), batch_size=32, shuffle=True))
    first_epoch = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    for epoch in range(first_epoch, 3):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for features, targets in loader:
            loss = criterion(trained(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if context.get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(folder, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)


num_processes, max_restarts = map(int, sys.argv[1:])
result = TorchTrainer(
    train_loop,
    scaling_config=ray.train.ScalingConfig(num_workers=num_processes),
    run_config=ray.train.RunConfig(
        storage_path=os.path.abspath("logs"), failure_config=ray.train.FailureConfig(max_failures=max_restarts)
    ),
).fit()
model = make_model()
with result.checkpoint.as_directory() as folder:
    model.load_state_dict(torch.load(os.path.join(folder, "state.pt"))["model"])
