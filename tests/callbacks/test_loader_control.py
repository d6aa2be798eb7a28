"""Callbacks that shorten loaders (check run), repeat their first batches (overfit), or leave them out (periods)."""

from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests.callbacks.recording import Recording, record
from tests.interrupt import at
from tests.tiny import loader, train

KEYS = ("train", "train_more", "valid", "valid_more")


class Watched(Recording):
    """A runner that also records its loaders at the start and the end of the stage and at the end of each epoch."""

    def on_stage_start(self, runner):
        super().on_stage_start(runner)
        self.before, self.orders = dict(self.loaders), set()

    def on_epoch_end(self, runner):
        super().on_epoch_end(runner)
        self.orders.add(tuple(self.loaders))

    def on_stage_end(self, runner):
        self.after = dict(self.loaders)
        super().on_stage_end(runner)


@pytest.mark.parametrize(
    ("arguments", "num_batches", "num_epochs"), [({}, 3, 3), ({"num_batch_steps": 4, "num_epoch_steps": 2}, 4, 2)]
)
def test_a_check_run_uses_every_loader_and_is_short(arguments, num_batches, num_epochs):
    """Ending the training loader early does not end the validation after it."""
    loaders = {key: [torch.zeros(2, 1)] * size for key, size in {"train": 10, "valid": 2, "valid_2": 5}.items()}

    runner = record(dl.CheckRunCallback(**arguments), loaders=loaders, num_epochs=7)

    expected = {"train": num_batches, "valid": 2, "valid_2": num_batches}
    epochs = range(1, num_epochs + 1)
    assert Counter(runner.places) == {(epoch, key): count for epoch in epochs for key, count in expected.items()}


def overfit(*callbacks):
    """Train for three epochs; return the runner and the batches by epoch and loader."""
    numbers = TensorDataset(torch.arange(20.0))
    loaders = {"train": DataLoader(numbers, batch_size=2, shuffle=True), "valid": DataLoader(numbers, batch_size=4)}
    runner = record(*callbacks, runner=Watched(), loaders=loaders, num_epochs=3)
    found = {}
    for place, (batch,) in zip(runner.places, runner.batches, strict=True):
        found.setdefault(place, []).append(tuple(batch.tolist()))
    return runner, found


@pytest.mark.parametrize(("amount", "num_batches"), [(1, 1), (3, 3), (0.2, 2), (0.01, 1), (50, 10)])
def test_first_batches_are_repeated_as_often_as_the_loader_has_batches(amount, num_batches):
    """The amount is a number of batches or a fraction; a shuffled loader repeats the same ones in every epoch."""
    _, found = overfit(dl.BatchOverfitCallback(**({} if amount == 1 else {"train": amount})))

    batches = found[1, "train"]
    assert len(set(batches)) == num_batches
    assert batches == (batches[:num_batches] * 10)[:10]
    assert [found[epoch, "train"] for epoch in (2, 3)] == [batches] * 2
    assert [found[epoch, "valid"] for epoch in (1, 2, 3)] == [[(0.0, 1.0, 2.0, 3.0)] * 5] * 3


@pytest.mark.parametrize("overfit_first", [True, False])
def test_original_loaders_are_put_back(overfit_first):
    """Loaders are restored even if another callback replaces them too, in either order."""
    callbacks = [dl.BatchOverfitCallback(), dl.PeriodicLoaderCallback(monitor="valid/loss", valid=2)]
    if not overfit_first:
        callbacks.reverse()

    runner, found = overfit(*callbacks)

    assert list(runner.after) == ["train", "valid"]
    assert all(runner.after[key] is runner.before[key] for key in ("train", "valid"))
    assert set(found) == {(1, "train"), (2, "train"), (2, "valid"), (3, "train")}


def test_batches_are_fetched_once():
    """Otherwise, a loader without a seed would give other batches in every epoch."""

    class Counted(list):
        num_passes = 0

        def __iter__(self):
            self.num_passes += 1
            return super().__iter__()

    loader = Counted(torch.tensor([float(number)]) for number in range(4))
    runner = record(dl.BatchOverfitCallback(train=2), loaders={"train": loader}, num_epochs=3)

    assert torch.cat(runner.batches).tolist() == [0.0, 1.0, 0.0, 1.0] * 3
    assert loader.num_passes == 1


def run_periods(*callbacks, num_epochs=7):
    loaders = {key: [torch.zeros(2, 1)] for key in KEYS}
    runner = record(*callbacks, runner=Watched(), loaders=loaders, num_epochs=num_epochs)
    return runner, {key: [epoch for epoch, each in runner.places if each == key] for key in KEYS}


def test_a_loader_with_a_period_runs_in_every_so_many_epochs():
    """A loader without a period runs in each epoch, one with period 0 never, and their order stays."""
    callback = dl.PeriodicLoaderCallback(monitor="valid/loss", mode="min", train_more=2, valid=3, valid_more=0)

    runner, ran = run_periods(callback)

    assert ran == {"train": [*range(1, 8)], "train_more": [2, 4, 6], "valid": [3, 6], "valid_more": []}
    assert set(runner.experiment_metrics[1]) == {"train"}
    assert set(runner.experiment_metrics[6]) == {"train", "train_more", "valid"}
    assert runner.orders == {KEYS}


def test_early_stopping_passes_over_epochs_without_the_loader():
    """Patience counts only epochs in which the metric was measured."""
    stop = dl.EarlyStoppingCallback(2, monitor="valid/loss", mode="min")

    runner, ran = run_periods(dl.PeriodicLoaderCallback(monitor="valid/loss", valid=2), stop, num_epochs=20)

    assert ran["valid"] == [2, 4, 6]
    assert runner.epoch_step == 6


@pytest.mark.parametrize(
    ("event", "key", "ends"),
    [
        ("on_experiment_start", None, (0, 0, 0)),
        ("on_stage_start", None, (0, 0, 0)),
        ("on_epoch_start", None, (1, 4, 4)),
        ("on_loader_start", "train", (2, 5, 8)),
        ("on_batch_start", "train", (2, 5, 8)),
        ("on_batch_end", "train", (2, 5, 8)),
        ("on_validation_end", "train", (2, 6, 6)),
        ("on_step_end", "train", (2, 5, 8)),
        ("on_loader_end", "train", (1, 4, 4)),
        ("on_loader_start", "valid", (2, 8, 7)),
        ("on_batch_end", "valid", (2, 8, 7)),
        ("on_loader_end", "valid", (1, 4, 4)),
        ("on_epoch_end", None, (1, 4, 4)),
        ("on_stage_end", None, (2, 8, 8)),
    ],
)
def test_what_need_early_stop_ends(event, key, ends):
    """Set once, in an event of a pass it ends this pass, before its next batch; elsewhere it ends the stage."""
    ended, evaluated = [], []

    def end(runner):
        if not ended and key in (None, runner.loader_key):
            runner.need_early_stop = True
            ended.append(event)

    note = at("on_batch_start", lambda runner: evaluated.append(runner.loader_key != "train"))
    loaders = {"train": loader(16, 4), "valid": loader(4, 2)}
    runner = train(loaders=loaders, callbacks=[at(event, end), note], num_epochs=2, valid_every_steps=2)

    assert (runner.epoch_step, runner.batch_step, sum(evaluated)) == ends


def endless():
    while True:
        yield from loader(8, 4)


def stop_after_three(runner):
    runner.need_early_stop = runner.loader_batch_step == 3


@pytest.mark.parametrize(
    "callback", [dl.CheckRunCallback(num_batch_steps=3, num_epoch_steps=2), at("on_batch_end", stop_after_three)]
)
def test_epochs_of_an_endless_generator_may_be_ended_by_a_callback(callback):
    """The next one reads on."""
    runner = train(loaders={"train": endless(), "valid": endless()}, num_epochs=2, callbacks=[callback])

    assert (runner.epoch_step, runner.batch_step) == (2, 6)


def test_a_generator_may_be_read_once_in_several_epochs():
    periods = dl.PeriodicLoaderCallback(monitor="valid/loss", mode="min", valid=2)
    loaders = {"train": loader(16, 4), "valid": (batch for batch in loader(8, 4))}

    runner = train(loaders=loaders, num_epochs=3, callbacks=[periods])

    assert [epoch for epoch, metrics in runner.experiment_metrics.items() if "valid" in metrics] == [2]


@pytest.mark.parametrize(
    ("key", "make", "options"),
    [
        ("train", lambda: (batch for batch in loader(8, 4)), {"num_epochs": 2}),
        ("train", lambda: iter(loader(8, 4)), {"num_steps": 3}),
        ("valid", lambda: map(list, loader(8, 4)), {"num_epochs": 2}),
        ("valid", lambda: iter(loader(8, 4)), {"valid_every_steps": 1}),
    ],
)
def test_an_iterator_that_has_ended_is_named_where_it_is_read_again(key, make, options):
    """A pass without a batch raises, in the next epoch or validation."""
    loaders = {"train": loader(16, 4), "valid": loader(8, 4), key: make()}

    with pytest.raises(ValueError, match=rf"loader '{key}' gave no batch.*can be read once.*pass what it was made"):
        train(loaders=loaders, **options)


@pytest.mark.parametrize("key", ["train", "valid"])
def test_a_generator_of_several_epochs_is_warned_of_before_training(key, caplog):
    loaders = {"train": loader(8, 4), "valid": loader(8, 4), key: endless()}

    train(loaders=loaders, num_epochs=2, callbacks=[at("on_batch_end", stop_after_three)])

    assert f"loader '{key}' is a generator, which can be read once" in caplog.text
