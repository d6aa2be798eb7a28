"""BYOL: a network predicts what a slow average of itself makes of another view."""

import torch
from torch.nn import functional as F

from runnerkit import dl
from tests.programs import draws
from tests.programs.common import loader, network, points

TAU = 0.1


def networks():
    models = {"online": network(2, 8, 4), "predictor": network(4, 4, seed=2), "target": network(2, 8, 4)}
    models["target"].requires_grad_(False)
    return models


def distance(models, left, right):
    predicted = models["predictor"](models["online"](torch.cat([left, right])))
    with torch.no_grad():
        targets = models["target"](torch.cat([right, left]))
    return -F.cosine_similarity(predicted, targets).mean()


def loop(batch_size):
    models, losses = networks(), []
    parameters = [*models["online"].parameters(), *models["predictor"].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for _ in range(2):
        for values, _ in loader(points(30), batch_size):
            left, right = (values + 0.1 * draws.randn(len(values), 2) for _ in range(2))
            optimizer.zero_grad()
            loss = distance(models, left, right)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for average, weight in zip(models["target"].parameters(), models["online"].parameters(), strict=True):
                    average.lerp_(weight, TAU)
            losses.append(loss.detach())
    return models, losses


class Program(dl.Runner):
    steps_itself = True

    def get_optimizer(self, stage, model):
        parameters = [*model["online"].parameters(), *model["predictor"].parameters()]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def handle_batch(self, batch):
        left, right = (batch[0] + 0.1 * torch.randn(len(batch[0]), 2) for _ in range(2))
        loss = distance(self.model, left, right)
        self.learn(loss)
        self.batch_metrics["loss"] = loss


def train(batch_size, *, callbacks=(), **options):
    return Program().train(
        model=networks(),
        loaders={"train": loader(points(30), batch_size)},
        callbacks=[dl.SoftUpdateCallback("target", "online", tau=TAU, scope="on_batch_end"), *callbacks],
        num_epochs=2,
        **options,
    )
