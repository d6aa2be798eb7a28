"""The size of a batch, whatever it is made of: with it goes the weight of its metrics."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.components import batch_size_of
from tests.tiny import classification, mlp

FEATURES = torch.zeros(4, 2)
Pair = namedtuple("Pair", ["features", "targets"])


@dataclass
class Pictures:
    name: str
    features: Tensor
    targets: Tensor


@pytest.mark.parametrize(
    "batch",
    [
        FEATURES,
        [torch.tensor(1.0), FEATURES],
        Pair(FEATURES, None),
        OrderedDict(features=FEATURES),
        UserDict(features=FEATURES),
        MappingProxyType({"features": FEATURES}),
        Pictures("a", FEATURES, FEATURES),
        {"inner": [Pictures("a", torch.tensor(1.0), UserDict(features=FEATURES))]},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_the_first_tensor_with_a_dimension_is_found(batch):
    """In lists, tuples, mappings that are no dict, dataclasses, and one in another."""
    assert batch_size_of(batch) == 4


@pytest.mark.parametrize("batch", [None, "four", 4, torch.tensor(4), Pictures, {}], ids=str)
def test_a_batch_without_a_tensor_is_one_sample(batch):
    """There is nothing to count; a class is no batch of its fields."""
    assert batch_size_of(batch) == 1


class Encoding(UserDict):
    """What tokenizers give: a mapping that is no dict and knows how to move itself."""

    def to(self, device, non_blocking=False):
        return Encoding({name: each.to(device) for name, each in self.data.items()})


@pytest.mark.parametrize("wrap", [lambda x, y: Pictures("a", x, y), lambda x, y: Encoding(features=x, targets=y)])
def test_a_loss_is_the_mean_over_samples_however_batches_are_wrapped(wrap):
    """33 samples in batches of 8 end with a batch of one, which weighs an eighth of the others."""
    data = classification(33)

    def collate(rows):
        features, targets = zip(*rows, strict=True)
        return wrap(torch.stack(features), torch.stack(targets))

    class Runner(dl.Runner):
        def handle_batch(self, batch):
            columns = batch if isinstance(batch, Encoding) else vars(batch)
            self.batch_metrics["loss"] = nn.functional.cross_entropy(
                self.model(columns["features"]), columns["targets"]
            )

    found = Runner(mlp(), dl.CPUEngine()).evaluate_loader(DataLoader(data, batch_size=8, collate_fn=collate))

    features, targets = data.tensors
    with torch.no_grad():
        expected = nn.functional.cross_entropy(mlp().eval()(features).double(), targets).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
