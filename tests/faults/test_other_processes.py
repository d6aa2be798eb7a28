"""A run that resumes with another number of processes or another engine sees each sample of the epoch once."""

import shutil
from collections import Counter

import pytest
from torch.utils.data import DataLoader, Dataset

from runnerkit import dl
from tests.tiny import classification, train

NUM_SAMPLES, NUM_STEPS = 52, 3


class Numbered(Dataset):
    """A data set whose samples include their index."""

    def __init__(self):
        self.data = classification(NUM_SAMPLES)

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        features, target = self.data[index]
        return {"features": features, "targets": target, "number": index}


class WriteDown(dl.Callback):
    """A callback that writes the samples of each step to a file of this rank, and raises before a given step."""

    def __init__(self, folder, stop_before=None):
        super().__init__(order=dl.CallbackOrder.External)
        self.folder, self.stop_before = folder, stop_before

    def on_batch_start(self, runner):
        if runner.batch_step == self.stop_before:
            runner.engine.barrier()  # by then the other ranks have written theirs
            raise KeyboardInterrupt

    def on_step_end(self, runner):
        if runner.batch_size == 0:
            return  # its samples belong to another rank
        name = f"epoch{runner.epoch_step}.{runner.engine.num_processes}.{runner.engine.rank}"
        with (self.folder / name).open("a") as file:
            file.writelines(f"{number}\n" for number in runner.batch["number"].tolist())


def fit(folder, engine, *, stop_before=None):
    folder.mkdir(exist_ok=True)
    save = dl.CheckpointCallback(folder / "log", content="runner", every_steps=NUM_STEPS)
    train(
        loaders={"train": DataLoader(Numbered(), batch_size=4, shuffle=True)}, engine=engine, num_epochs=2,
        callbacks=[WriteDown(folder, stop_before), save], logdir=folder / "log", resume="auto",
    )  # fmt: skip


def seen(folder, epoch):
    return Counter(int(line) for file in folder.glob(f"epoch{epoch}.*") for line in file.read_text().split())


def engine(name):
    kind, num_processes = name.split()
    if kind == "FSDP":
        return dl.FullyShardedDataParallelEngine(int(num_processes), device="cpu", sharded_checkpoints=True)
    return dl.CPUEngine() if kind == "CPU" else dl.DistributedDataParallelEngine(int(num_processes), device="cpu")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Return a copy of a run that was interrupted after a few steps of the first epoch."""
    folders = {}

    def copy(name, to):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name.replace(" ", "")) / "run"
            with pytest.raises(KeyboardInterrupt):
                fit(folders[name], engine(name), stop_before=NUM_STEPS + 1)
        shutil.copytree(folders[name], to, symlinks=True)
        return to

    return copy


@pytest.mark.parametrize(
    ("before", "after"),
    [("DDP 2", "CPU 1"), ("CPU 1", "DDP 3"), ("DDP 2", "FSDP 2"), ("FSDP 2", "CPU 1")],
    ids=lambda name: name,
)
def test_each_sample_of_the_interrupted_epoch_is_seen_once(interrupted, tmp_path, before, after):
    """Each engine sees half of the epoch, and the next epoch is complete too."""
    folder = interrupted(before, tmp_path / "run")
    num_before = engine(before).num_processes
    assert seen(folder, 1).total() == NUM_STEPS * 4 * num_before

    fit(folder, engine(after))

    assert seen(folder, 1) == seen(folder, 2) == Counter(range(NUM_SAMPLES))
