"""Loaders that write each batch into the same memory, as DALI's do: each batch arrives as it was."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from runnerkit.support.device_move import copied
from tests.tiny import NUM_FEATURES, classification, mlp, sgd, train, train_by_hand, weights

SIZE, BATCHES = 4, 7


class Overwrites:
    """A loader without a length, or with a wrong one, that yields the same tensors again and again."""

    def __iter__(self):
        features, targets = torch.empty(SIZE, NUM_FEATURES), torch.empty(SIZE, dtype=torch.int64)
        for new_features, new_targets in DataLoader(classification(SIZE * BATCHES), SIZE):
            features.copy_(new_features)
            targets.copy_(new_targets)
            yield features, targets


class Claims(Overwrites):
    def __len__(self):
        return BATCHES - 2


class Stream(Overwrites, IterableDataset):
    pass


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(
    "make", [Overwrites, Claims, lambda: DataLoader(Stream(), batch_size=None)], ids=["custom", "too short", "stream"]
)
@pytest.mark.filterwarnings("ignore")
def test_a_batch_is_not_overwritten_by_the_one_that_is_fetched_ahead(make, accumulate):
    """The end of a loader is found by fetching its next batch before the current one is trained on."""
    model, expected = mlp(), mlp()

    train(model, loaders={"train": make()}, accumulation_steps=accumulate)

    samples, step = classification(SIZE * BATCHES), SIZE * accumulate
    steps = [samples[start : start + step] for start in range(0, SIZE * BATCHES, step)]
    train_by_hand(expected, sgd(expected), steps)
    torch.testing.assert_close(weights(model), weights(expected), rtol=0, atol=1e-6)


@dataclass
class Pair:
    first: torch.Tensor
    second: np.ndarray


def test_a_copy_shares_no_memory_with_the_batch():
    """In containers, too; what is not data stays the same object."""
    place, known = torch.zeros(2), object()
    batch = {"pair": Pair(place, np.zeros(2)), "rows": [place, (place,)], "known": known, "name": "a"}

    copy = copied(batch)
    place += 1
    batch["pair"].second += 1

    assert type(copy["pair"]) is Pair and copy["known"] is known and copy["name"] == "a"
    for each in (copy["pair"].first, copy["pair"].second, copy["rows"][0], copy["rows"][1][0]):
        assert not each.any()
