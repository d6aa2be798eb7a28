"""When a run has ended on a rank, its checkpoints can be read there: rank zero, which names them, has finished."""

import time
from functools import partial

import pytest

from runnerkit import dl, utils
from runnerkit.checkpoints.folder import CheckpointFolder
from tests.engines.together import together
from tests.tiny import train

SHARDED = partial(dl.FullyShardedDataParallelEngine, sharded_checkpoints=True)


def train_and_read(engine, folder):
    """Train with a rank zero that is slow to name a checkpoint; read the last one on every rank."""
    point = CheckpointFolder.set_alias

    def point_slowly(self, *args):
        time.sleep(0.3)
        point(self, *args)

    CheckpointFolder.set_alias = point_slowly
    try:
        train(num_epochs=2, engine=engine, callbacks=[dl.CheckpointCallback(folder, content="runner")])
    finally:
        CheckpointFolder.set_alias = point
    assert utils.load_checkpoint(CheckpointFolder(folder / "checkpoints").named("last"))["counters"]["epoch_step"] == 2


@pytest.mark.parametrize("engine", [dl.DistributedDataParallelEngine, SHARDED])
def test_every_rank_reads_the_last_checkpoint_after_a_run(engine, tmp_path):
    """Ranks other than zero do not return from a run before its last checkpoint has its name."""
    together(lambda: train_and_read(engine(2, device="cpu"), tmp_path))
