"""BatchOverfitCallback repeats the same few batches."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit.callbacks.control.overfit import BatchOverfitCallback
from runnerkit.callbacks.control.periodic_loader import PeriodicLoaderCallback
from runnerkit.engines import CPUEngine
from runnerkit.runner import IRunner
from tests.callbacks.stand_ins import make_runner


class RecordingRunner(IRunner):
    """A runner that records its batches as {(epoch, loader): batches}."""

    def __init__(self, *callbacks):
        super().__init__(nn.Linear(1, 1), CPUEngine())
        self._given = callbacks
        self.shown = {}

    def get_stage_len(self, stage):
        return 3

    def get_loaders(self, stage):
        numbers = TensorDataset(torch.arange(20.0))
        return {
            "train": DataLoader(numbers, batch_size=2, shuffle=True),
            "valid": DataLoader(numbers, batch_size=4),
        }

    def get_callbacks(self, stage):
        return {str(position): callback for position, callback in enumerate(self._given)}

    def on_stage_start(self, runner):
        self.loaders_before = dict(self.loaders)

    def on_stage_end(self, runner):
        self.loaders_after = dict(self.loaders)

    def handle_batch(self, batch):
        self.shown.setdefault((self.epoch_step, self.loader_key), []).append(tuple(batch[0].tolist()))


def test_first_batch_is_repeated_as_often_as_the_loader_has_batches():
    """A shuffled loader also repeats one batch, in every epoch."""
    runner = RecordingRunner(BatchOverfitCallback()).run()

    train = [batch for (_, key), batches in runner.shown.items() if key == "train" for batch in batches]
    valid = [batch for (_, key), batches in runner.shown.items() if key == "valid" for batch in batches]
    assert (len(train), len(set(train))) == (3 * 10, 1)
    assert valid == [(0.0, 1.0, 2.0, 3.0)] * 3 * 5


@pytest.mark.parametrize(("amount", "num_batches"), [(3, 3), (0.2, 2), (0.01, 1), (50, 10)])
def test_amount_is_a_number_of_batches_or_a_fraction(amount, num_batches):
    """At least one batch is used, and several are repeated in turn."""
    runner = RecordingRunner(BatchOverfitCallback(train=amount)).run()

    shown = runner.shown[1, "train"]
    assert len(shown) == 10
    assert len(set(shown)) == num_batches
    assert shown == (shown[:num_batches] * 10)[:10]
    assert len(set(runner.shown[1, "valid"])) == 1


@pytest.mark.parametrize("overfit_first", [True, False])
def test_original_loaders_are_put_back(overfit_first):
    """Loaders are restored even if another callback replaces them too, in either order."""
    callbacks = [BatchOverfitCallback(), PeriodicLoaderCallback("valid", "loss", valid=2)]
    if not overfit_first:
        callbacks.reverse()
    callbacks[overfit_first].requires = ()  # the runner logs no metric

    runner = RecordingRunner(*callbacks).run()

    assert list(runner.loaders_after) == ["train", "valid"]
    assert all(runner.loaders_after[key] is runner.loaders_before[key] for key in ("train", "valid"))
    assert set(runner.shown) == {(1, "train"), (2, "train"), (2, "valid"), (3, "train")}


def test_batches_are_fetched_once():
    """Otherwise, a loader without a seed would give other batches in every epoch."""

    class Counted(list):
        num_passes = 0

        def __iter__(self):
            self.num_passes += 1
            return super().__iter__()

    loader, callback = Counted("abcd"), BatchOverfitCallback(train=2)
    runner = make_runner(loaders={"train": loader})
    callback.on_stage_start(runner)

    shown = []
    for _ in range(3):
        callback.on_epoch_start(runner)
        shown.append("".join(runner.loaders["train"]))
        callback.on_epoch_end(runner)

    assert shown == ["abab"] * 3
    assert loader.num_passes == 1


@pytest.mark.parametrize("amount", [0, -1, 1.5])
def test_bad_amount_is_refused(amount):
    """The amount is neither a number of batches nor a fraction."""
    with pytest.raises(ValueError, match=f"train must be a number of batches >= 1 or a fraction .*, got {amount}"):
        BatchOverfitCallback(train=amount)


def test_misspelt_loader_is_refused():
    """Otherwise its amount would silently be 1."""
    with pytest.raises(ValueError, match=r"there is no loader 'trian'; the loaders are \['train', 'valid'\]"):
        RecordingRunner(BatchOverfitCallback(trian=2)).run()


def test_loader_without_length_is_refused():
    """Without a length, the number of repetitions is unknown."""
    runner = make_runner(loaders={"train": iter([1])})

    with pytest.raises(TypeError, match=r"loader 'train' must have a len\(\)"):
        BatchOverfitCallback().on_epoch_start(runner)
