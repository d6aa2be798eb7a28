"""Train on a Ray cluster with runnerkit: python ours.py NUM_PROCESSES MAX_RESTARTS"""

import sys

from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl

from model import make_data, make_model, make_optimizer

num_processes, max_restarts = map(int, sys.argv[1:])
model = make_model()
dl.SupervisedRunner().train(
    model=model,
    criterion=nn.CrossEntropyLoss(),
    optimizer=make_optimizer(model.parameters()),
    loaders={"train": DataLoader(make_data(), batch_size=32, shuffle=True)},
    engine=dl.DistributedDataParallelEngine(
        num_processes, device="cpu", launcher=dl.RayLauncher(max_restarts=max_restarts)
    ),
    num_epochs=3,
    logdir="logs",
    resume="auto",
)
