"""A table of embeddings with sparse gradients and a dense head: two optimizers step on one loss."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from runnerkit import dl
from tests.programs.common import loader


def network():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.EmbeddingBag(30, 4, sparse=True), nn.Linear(4, 2))


def optimizers(model):
    return {
        "table": torch.optim.SparseAdam(model[0].parameters(), lr=0.05),
        "head": torch.optim.Adam(model[1].parameters(), lr=0.05),
    }


def words(number):
    rows = torch.randint(30, (number, 3), generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows, (rows.sum(dim=1) > 45).long())


def loop(batch_size):
    model, losses = network(), []
    both = optimizers(model).values()
    for _ in range(2):
        for rows, targets in loader(words(25), batch_size):
            for optimizer in both:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(rows), targets)
            loss.backward()
            for optimizer in both:
                optimizer.step()
            losses.append(loss.detach())
    return model, losses


class Program(dl.Runner):
    steps_itself = True

    def get_optimizer(self, stage, model):
        return optimizers(model)

    def handle_batch(self, batch):
        rows, targets = batch
        for optimizer in self.optimizer.values():
            self.engine.zero_grad(optimizer)
        self.batch_metrics["loss"] = loss = F.cross_entropy(self.model(rows), targets)
        self.engine.backward(loss)
        for optimizer in self.optimizer.values():
            self.engine.step(optimizer)


def train(batch_size, **options):
    return Program().train(
        model=network(),
        loaders={"train": loader(words(25), batch_size)},
        num_epochs=2,
        **options,
    )
