"""A process's share of a loader: of one that nobody divides, of a user's object, and of a recorded one."""

import pytest
import torch

from runnerkit import dl
from runnerkit.callbacks.debug.parts.recorded_loader import record_loader, stop_recording
from runnerkit.sampling.sharding import is_length_sure, share_of, start_epoch


def test_a_loader_that_nobody_divides_has_a_share_without_a_position():
    """Each process reads such a loader as it is."""
    share = share_of([1, 2, 3])

    assert not share.has_position and not share.is_at_start and not share.knows_sizes
    with pytest.raises(TypeError, match="does not have a position"):
        share.skip(2)


class Own:
    """A batch sampler with the three methods of 0.1."""

    batch_size, drop_last = 2, True

    def __init__(self):
        self.calls = []

    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def set_epoch(self, epoch):
        self.calls.append(epoch)

    def position_after(self, num_batches):
        return 10 * num_batches

    def skip(self, position):
        self.calls.append(position)


class OwnLoader:
    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler


@pytest.mark.parametrize("wrap", [lambda loader: loader, dl.BatchPrefetchLoaderWrapper])
def test_a_users_object_with_the_methods_of_0_1_is_a_share(wrap):
    """Other members have defaults: the sizes of its batches are unknown, and nothing ends its pass early."""
    own = Own()
    loader = wrap(OwnLoader(own))

    start_epoch(loader, 3)
    share = share_of(loader)
    share.skip(share.position_after(2))
    share.need(1)
    share.end_after(1)
    share.drop_last = False

    assert own.calls == [3, 20]
    assert share.has_position and share.is_used and not share.knows_sizes and share.full_size is None
    assert (share.batch_size, share.described(), own.drop_last) == (2, None, False)


@pytest.mark.parametrize(("has_sampler", "is_sure"), [(True, True), (False, False)])
def test_only_the_length_of_torchs_batch_samplers_is_sure(has_sampler, is_sure):
    """An object that divides batches itself may end before its length, which a run has to notice."""
    own = Own()
    if has_sampler:
        own.sampler = torch.utils.data.SequentialSampler(range(4))

    assert is_length_sure(OwnLoader(own)) is is_sure


def test_recording_the_batches_of_a_loader_keeps_its_share():
    """With ``check=True``, steps are weighted by the sizes of the batches as without it."""
    loader = dl.TensorLoader(torch.arange(5), batch_size=2)
    shard = loader.shard(key="train", training=True, rank=1, world_size=2, seed=1)
    share = share_of(shard)

    record_loader(shard)

    assert share_of(shard) is share
    assert share.sizes_of(1) == [1, 0]
    stop_recording(shard)
    assert share_of(shard) is share is shard.batch_sampler
