"""check=True verifies that all processes read one common stream."""

import os

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from runnerkit import dl
from tests.tiny import NUM_CLASSES, NUM_FEATURES, train


class Stream(IterableDataset):
    """Samples with noise; of its first 16 samples, which each run compares, nothing depends on the process."""

    num_shards = 8

    def __init__(self, lanes=None, is_bad=False):
        self.lanes, self.is_bad = lanes, is_bad

    def shard(self, num_shards, index):
        for place in range(12):
            rank = int(os.environ.get("RANK", "0"))
            is_other = self.is_bad and place > 2 and rank == 1
            features = torch.full((NUM_FEATURES,), float(12 * index + place)) + torch.rand(NUM_FEATURES)
            yield features / 100 + is_other, place % NUM_CLASSES

    def __iter__(self):
        for place in range(8):
            yield from list(self.shard(8, place))[:2]
        for index in range(8):
            yield from self.shard(8, index)


def findings(stream, *, num_workers=0, **options):
    callback = dl.VerifyRanksCallback()
    loaders = {key: DataLoader(stream, 4, num_workers=num_workers) for key in ("train", "valid")}
    callbacks = [dl.CheckRunCallback(num_batch_steps=4), callback]
    train(loaders=loaders, num_epochs=2, callbacks=callbacks, num_processes=2, **options)
    return callback.findings


@pytest.mark.parametrize(
    ("lanes", "epoch_steps", "num_workers"), [((1, 1), None, 0), (None, None, 0), (None, 4, 0), (None, 6, 2)]
)
def test_a_stream_is_compared_batch_by_batch(lanes, epoch_steps, num_workers):
    """Generic streams, and lanes with workers."""
    found = findings(Stream(lanes), epoch_steps=epoch_steps, num_workers=num_workers)

    for key in ("train", "valid"):
        assert f"2 ranks saw 8 batches of loader '{key}', which are shares of one common stream" in found


def test_a_stream_that_differs_later_is_named():
    """The comparison of the first samples does not see it."""
    with pytest.raises(ValueError, match="rank 1 saw other samples in its batch 3 than its share of the stream that"):
        findings(Stream((1, 1), is_bad=True))
