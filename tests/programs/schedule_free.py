"""Schedule-free SGD, whose weights in evaluation are not those of training."""

import torch
from torch import nn
from torch.nn import functional as F

from runnerkit import dl
from tests.programs.common import loader, network, points

BETA = 0.9


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): the weights are y in training, and the average x in evaluation."""

    def __init__(self, params, lr=0.2):
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    def _exchange(self, weight, *, to_training):
        for group in self.param_groups:
            if group["train_mode"] != to_training:
                for each in group["params"]:
                    if "z" in self.state[each]:
                        each.lerp_(self.state[each]["z"], weight)
                group["train_mode"] = to_training

    @torch.no_grad()
    def train(self):
        self._exchange(1 - BETA, to_training=True)

    @torch.no_grad()
    def eval(self):
        self._exchange(1 - 1 / BETA, to_training=False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "call train() before step()"
            group["k"] += 1
            for each in group["params"]:
                if each.grad is None:
                    continue
                z = self.state[each].setdefault("z", each.clone())
                share = 1 / group["k"]
                each.lerp_(z, share)
                each.add_(each.grad, alpha=group["lr"] * (BETA * (1 - share) - 1))
                z.sub_(each.grad, alpha=group["lr"])


def loop(batch_size):
    model, losses = network(2, 8, 2), []
    optimizer = ScheduleFreeSGD(model.parameters())
    optimizer.train()
    for _ in range(2):
        for values, targets in loader(points(25), batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(values), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    optimizer.eval()
    return model, losses


def train(batch_size, **options):
    return dl.SupervisedRunner().train(
        model=network(2, 8, 2),
        criterion=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: ScheduleFreeSGD(parameters),
        loaders={"train": loader(points(25), batch_size)},
        num_epochs=2,
        **options,
    )
