"""Graphs of different sizes, joined to one in a batch; the loss is the mean over their nodes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runnerkit import dl
from tests.programs.common import loader


@dataclass
class Graph:
    """One graph or several: nodes (N, 3), edges (2, E), targets (N,)."""

    nodes: Tensor
    edges: Tensor
    targets: Tensor
    num_graphs: int = 1


def graphs(number):
    """Draw rings of 3 to 9 nodes; the target of a node tells whether the first value of its neighbor is positive."""
    generator, drawn = torch.Generator().manual_seed(0), []
    for size in torch.randint(3, 10, (number,), generator=generator).tolist():
        nodes, places = torch.randn(size, 3, generator=generator), torch.arange(size)
        drawn.append(Graph(nodes, torch.stack([places.roll(1), places]), (nodes[:, 0].roll(1) > 0).long()))
    return drawn


def join(parts):
    sizes = torch.tensor([len(each.nodes) for each in parts])
    edges = [each.edges + start for each, start in zip(parts, sizes.cumsum(0) - sizes, strict=True)]
    nodes, targets = (torch.cat(each) for each in zip(*((part.nodes, part.targets) for part in parts), strict=True))
    return Graph(nodes, torch.cat(edges, dim=1), targets, len(parts))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.own, self.neighbors, self.head = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, nodes, edges):
        source, target = edges
        received = torch.zeros(len(nodes), 8, dtype=nodes.dtype).index_add(0, target, self.neighbors(nodes)[source])
        return self.head(torch.tanh(self.own(nodes) + received))


def loop(batch_size):
    model, losses = Convolution(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for graph in loader(graphs(17), batch_size, collate_fn=join):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(graph.nodes, graph.edges), graph.targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return model, losses


class Program(dl.Runner):
    steps_itself = True

    def handle_batch(self, graph):
        self.batch_size, self.batch_weight = graph.num_graphs, len(graph.nodes)
        loss = F.cross_entropy(self.model(graph.nodes, graph.edges), graph.targets)
        self.learn(loss)
        self.batch_metrics["loss"] = loss


def train(batch_size, **options):
    return Program().train(
        model=Convolution(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        loaders={"train": loader(graphs(17), batch_size, collate_fn=join)},
        num_epochs=2,
        **options,
    )
