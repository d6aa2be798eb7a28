"""Tests that ``set_epoch`` is called on every nested part of a loader that has it."""

import pytest
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, DistributedSampler, StackDataset, Subset

from runnerkit import dl
from runnerkit.data import BatchLimitLoaderWrapper
from runnerkit.sampling.sharding import batches_of, shard_loader, start_epoch
from tests.shares import Stream


class Told:
    """Sampler and data set that records its epochs."""

    def __init__(self, num_samples):
        self.num_samples = num_samples
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        return iter(range(self.num_samples))

    def __getitem__(self, index):
        return index


class OwnBatches(BatchSampler):
    pass


class ToldBatches(Told, BatchSampler):
    def __init__(self, sampler, num_samples):
        Told.__init__(self, num_samples)
        self.sampler = sampler

    def __iter__(self):
        return iter([index] for index in self.sampler)


class ToldLoader(Told):
    def __init__(self, batch_sampler):
        super().__init__(1)
        self.batch_sampler = batch_sampler


def shared(loader, world_size=1):
    return shard_loader(loader, key="train", training=True, rank=0, world_size=world_size, seed=42)


def test_each_part_is_told_once_an_epoch():
    """set_epoch is called once per epoch on loaders, samplers and data sets, nested and wrapped ones too."""
    data, sampler = Told(8), Told(8)
    batches = ToldBatches(sampler, 8)
    of_batches = DataLoader(Subset(data, range(8)), batch_sampler=batches)
    plain_data, plain_sampler = Told(8), Told(8)
    plain = DataLoader(plain_data, sampler=plain_sampler)
    mine = ToldLoader(ToldBatches(Told(8), 8))

    for epoch in (1, 2):
        for each in (shared(of_batches, world_size=2), shared(BatchLimitLoaderWrapper(plain, 1)), shared(mine)):
            start_epoch(each, epoch)

    told = [data, sampler, batches, plain_data, plain_sampler, mine, mine.batch_sampler, mine.batch_sampler.sampler]
    assert [each.epochs for each in told] == [[1, 2]] * len(told)


class ToldCollate(Told):
    def __call__(self, samples):
        return len(samples), self.epochs[-1]


def test_data_sets_in_a_concatenation_or_a_stack_are_told():
    """set_epoch is called on data sets within ConcatDataset and StackDataset."""
    first, second, third, fourth = (Told(4) for _ in range(4))
    named = StackDataset(a=ConcatDataset([first, second]), b=range(8))
    whole = ConcatDataset([named, StackDataset(third, Subset(fourth, range(4)))])

    start_epoch(shared(DataLoader(whole)), 1)

    assert [each.epochs for each in (first, second, third, fourth)] == [[1]] * 4


@pytest.mark.parametrize("data", [range(4), Stream(range(4))], ids=["indexed", "stream"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_fn_is_told(data, num_workers):
    """set_epoch is called on collate_fn, also in persistent workers."""
    collate = ToldCollate(0)
    mine = DataLoader(data, 2, collate_fn=collate, num_workers=num_workers, persistent_workers=num_workers > 0)
    share = shared(mine)

    for epoch in (1, 2):
        start_epoch(share, epoch)
        assert list(batches_of(share)) == [(2, epoch), (2, epoch)]
    assert collate.epochs == [1, 2]


def test_a_distributed_sampler_inside_a_batch_sampler_shuffles_anew_in_each_epoch():
    """A DistributedSampler within a batch sampler gives torch's order for each epoch."""
    data = range(20)
    batches = BatchSampler(DistributedSampler(data, num_replicas=2, rank=0, shuffle=True), 5, False)
    theirs = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
    mine = shared(DataLoader(data, batch_sampler=batches), world_size=2)

    for epoch in (1, 2):
        start_epoch(mine, epoch)
        theirs.set_epoch(epoch)
        assert [int(index) for batch in batches_of(mine) for index in batch] == list(theirs)


def test_a_sampler_inside_a_batch_sampler_of_the_users_own_changes_with_the_epoch():
    """A sampler within a custom batch sampler changes its length by epoch, as it does alone."""
    sampler, alone = (dl.DynamicBalanceClassSampler([0] * 90 + [1] * 10, exp_lambda=0.5) for _ in range(2))
    mine = shared(DataLoader(range(100), batch_sampler=OwnBatches(sampler, 10, False)))

    found = []
    for epoch in (1, 2, 3):
        start_epoch(mine, epoch)
        alone.set_epoch(epoch)
        found.append(sum(len(batch) for batch in batches_of(mine)))
        assert found[-1] == len(alone)
    assert found[2] < found[0]


def test_a_sharded_sampler_in_a_loader_of_the_users_own_tells_its_sampler():
    """A custom loader with a sharded sampler passes the epoch on to the original sampler."""
    sampler = Told(8)
    share = shared(DataLoader(range(8), sampler=sampler)).batch_sampler

    start_epoch(ToldLoader(share), 3)

    assert sampler.epochs == [3] and share.epoch == 3
    assert list(share) == [[index] for index in range(8)]
