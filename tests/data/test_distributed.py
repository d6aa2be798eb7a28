"""Any sampler, sharded as torch's DistributedSampler shards a data set."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset, WeightedRandomSampler

from runnerkit.data import BalanceClassSampler, DistributedSamplerWrapper, DynamicBalanceClassSampler
from tests.data.places import flat, share


def shares(make_sampler, world_size, *, epoch, **kwargs):
    """Return each rank's indices; every rank makes its own sampler, with its global generator in another state."""
    result = []
    for rank in range(world_size):
        torch.rand(rank + 1)
        sampler = DistributedSamplerWrapper(make_sampler(), num_replicas=world_size, rank=rank, **kwargs)
        sampler.set_epoch(epoch)
        result.append(list(sampler))
        assert len(sampler) == len(result[-1])
    return result


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_of_a_permutation_each_sample_is_seen_once(world_size, shuffle):
    """24 shuffled samples are each seen once, in another order in another epoch."""
    ranks = shares(lambda: RandomSampler(range(24)), world_size, epoch=1, shuffle=shuffle)

    assert sorted(flat(ranks)) == list(range(24))
    assert ranks != shares(lambda: RandomSampler(range(24)), world_size, epoch=2, shuffle=shuffle)
    assert ranks == shares(lambda: RandomSampler(range(24)), world_size, epoch=1, shuffle=shuffle)


def test_what_a_sampler_draws_is_kept():
    """A balanced epoch is balanced over all processes, and no process sees a sample outside of it."""
    labels = [0] * 40 + [1] * 8
    [first, second] = shares(lambda: BalanceClassSampler(labels), 2, epoch=1)
    weighted = shares(lambda: WeightedRandomSampler([1.0] * 8 + [0.0] * 40, 30), 2, epoch=1)

    assert len(set(first + second)) == 16
    assert sum(labels[index] for index in first + second) == 8
    assert all(set(each) <= set(range(8)) and len(each) == 15 for each in weighted)


def test_without_shuffling_it_is_torchs_own_sampler_over_the_order():
    """Padding matches too: 10 samples for 4 processes."""
    order = [3, 1, 4, 15, 9, 2, 6, 5, 35, 8]

    ranks = shares(lambda: order, 4, epoch=1, shuffle=False)

    for rank, own in enumerate(ranks):
        reference = DistributedSampler(order, num_replicas=4, rank=rank, shuffle=False)
        assert own == [order[place] for place in reference]


def test_a_length_that_changes_by_epoch_is_followed():
    """The shards' length follows a dynamic sampler's."""

    def make():
        return DynamicBalanceClassSampler([0] * 90 + [1] * 10, exp_lambda=0.5, ignore_warning=True)

    assert [len(each) for each in shares(make, 2, epoch=1)] == [50, 50]
    assert [len(each) for each in shares(make, 2, epoch=2)] == [20, 20]


def test_the_engine_leaves_it_alone():
    """The engine leaves any DistributedSampler of the user unchanged."""
    sampler = DistributedSamplerWrapper(RandomSampler(range(8)), num_replicas=2, rank=1)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, sampler=sampler)

    assert share(loader, 1, 2, epoch=None) is loader


def test_a_sampler_without_length_is_refused():
    """Without a length, there are no equal shards."""
    with pytest.raises(TypeError, match="list_iterator does not have a length"):
        DistributedSamplerWrapper(iter([1, 2]), num_replicas=2, rank=0)
