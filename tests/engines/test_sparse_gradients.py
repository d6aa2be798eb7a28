"""Sparse gradients: a row that no sample of a step looks up is not moved, on any process."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests.tiny import train

ENGINES = [dl.DistributedDataParallelEngine, pytest.param(dl.HorovodEngine, marks=pytest.mark.horovod)]


def words(num_samples):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(40, (num_samples, 3), generator=generator)
    return TensorDataset(rows, torch.randn(num_samples, generator=generator, dtype=torch.float64))


class Sum(nn.Module):
    """A model that sums the numbers of its words."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        options = {"mode": "sum"} if kind is nn.EmbeddingBag else {}
        self.table = kind(40, 1, sparse=True, dtype=torch.float64, **options)

    def forward(self, rows):
        return self.table(rows).flatten(1).sum(dim=1)


def by_hand(model, data, batch_size):
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    for _ in range(2):
        for rows, targets in DataLoader(data, batch_size=batch_size):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(rows), targets).backward()
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_process_without_a_sample_moves_no_row(engine, kind):
    """SparseAdam moves each row that a gradient lists, and 9 samples leave the second process none in the last step."""
    if engine is dl.HorovodEngine:
        pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")
    data, model = words(9), Sum(kind)
    expected = copy.deepcopy(model)
    by_hand(expected, data, batch_size=4)

    options = {"criterion": nn.MSELoss(), "optimizer": torch.optim.SparseAdam(model.parameters(), lr=0.1)}
    batches = {"train": DataLoader(data, batch_size=2)}
    train(model, loaders=batches, num_epochs=2, engine=engine(2, device="cpu"), **options)

    torch.testing.assert_close(model.table.weight, expected.table.weight, rtol=0, atol=1e-12)
