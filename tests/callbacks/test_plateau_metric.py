"""Tests that ReduceLROnPlateau reads the metric that selects the best checkpoint."""

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runnerkit import dl
from runnerkit.monitor import Monitor
from tests.tiny import loader, mlp, sgd, train

ACCURACY = {"monitor": "valid/accuracy", "mode": "max"}
LOSS = {"monitor": "valid/loss", "mode": "min"}


class Recorded(ReduceLROnPlateau):
    """A scheduler that records what it is told."""

    def __init__(self, *args, **kwargs):
        self.told = []
        super().__init__(*args, **kwargs)

    def step(self, metrics, epoch=None):
        self.told.append(float(metrics))
        super().step(metrics)


def fit(waits_for, *callbacks, keys=("valid",), warmup_steps=0, **options):
    """Train; return the values that the scheduler got and the metrics."""
    model = mlp()
    optimizer = sgd(model)
    told = scheduler = Recorded(optimizer, mode=waits_for)
    if warmup_steps:
        scheduler = dl.WarmupLR(optimizer, num_steps=warmup_steps, after=told)
    loaders = {"train": loader(16, 4), **{key: loader(8, 4, seed=seed) for seed, key in enumerate(keys, start=1)}}
    callbacks = [dl.AccuracyCallback("logits", "targets"), *callbacks]
    options |= {"scheduler": scheduler, "loaders": loaders, "callbacks": callbacks}
    return told.told, train(model, optimizer=optimizer, num_epochs=3, **options).experiment_metrics


def of(metrics, key, name):
    return [metrics[epoch][key][name] for epoch in sorted(metrics)]


@pytest.mark.parametrize("key", ["valid", "val"])
def test_it_reads_what_selects_the_best_checkpoint(tmp_path, key):
    """Mode max gets the accuracy, mode min the loss, of the loader that selects the best checkpoint."""
    told, metrics = fit("max", keys=(key,), logdir=tmp_path / "a", **{**ACCURACY, "monitor": f"{key}/accuracy"})
    assert told == of(metrics, key, "accuracy")
    told, metrics = fit("min", keys=(key, "other"), logdir=tmp_path / "b", **{**LOSS, "monitor": f"{key}/loss"})
    assert told == of(metrics, key, "loss")


def test_without_a_logdir_it_reads_the_same_metric():
    """The monitor of `train`, also of a loader whose key has a slash; its mode must be that of the scheduler."""
    told, metrics = fit("max", **ACCURACY)
    assert told == of(metrics, "valid", "accuracy")
    told, metrics = fit("min", keys=("valid", "valid/easy"), monitor="valid/easy/loss")
    assert told == of(metrics, "valid/easy", "loss")
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau\(mode='min'\) would read 'accuracy'"):
        fit("min", **ACCURACY)


class Saver(dl.ICheckpointCallback):
    """A user's own, with the attributes from before `monitor`."""

    loader_key, metric_key, minimize = "valid", "accuracy", False


class SaverOfToday(dl.ICheckpointCallback):
    monitor = Monitor("valid", "accuracy", minimize=False)


@pytest.mark.parametrize("saver", [Saver, SaverOfToday])
def test_it_reads_what_a_saver_of_the_user_says(caplog, saver):
    """Without a warning that the saver selects nothing, which a saver without a monitor gets."""
    told, metrics = fit("max", saver(), **LOSS)

    assert told == of(metrics, "valid", "accuracy")
    assert "does not select a checkpoint" not in caplog.text
    fit("min", dl.ICheckpointCallback(), **LOSS)
    assert "monitor='valid/loss' does not select a checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("mode", "judge", "words"),
    [
        ("min", ACCURACY, ["accuracy", "mode='max'"]),
        ("max", LOSS, ["loss", "mode='min'"]),
        ("max", {}, ["loss", "mode='min'", "SchedulerCallback"]),
    ],
)
def test_a_mode_of_the_other_direction_is_refused(tmp_path, mode, judge, words):
    """A scheduler that waits for larger values is not told a loss, nor the reverse."""
    with pytest.raises(ValueError, match="ReduceLROnPlateau") as error:
        fit(mode, logdir=tmp_path, **judge)
    assert all(each in str(error.value) for each in words)


def test_without_a_best_checkpoint_it_reads_the_loss_of_the_evaluation_loader():
    """With one evaluation loader, whatever its key; with several, of "valid"; with none, of the training loader."""
    for keys, key in ((("val",), "val"), (("test", "valid"), "valid"), ((), "train")):
        told, metrics = fit("min", keys=keys)
        assert told == of(metrics, key, "loss")


def test_after_each_step_it_reads_the_loss_of_the_batch(tmp_path):
    """Whatever selects the best checkpoint, and however many evaluation loaders there are."""
    monitor = {"monitor": "a/accuracy", "mode": "max"}
    for folder in ({}, {"logdir": tmp_path}):
        told, metrics = fit("min", keys=("a", "b"), scheduler_interval="step", **monitor, **folder)
        means = [sum(told[start : start + 4]) / 4 for start in (0, 4, 8)]
        assert means == pytest.approx(of(metrics, "train", "loss"))


def test_several_evaluation_loaders_without_a_choice_are_refused():
    """The message lists the loaders and says what to pass."""
    with pytest.raises(ValueError, match="SchedulerCallback") as error:
        fit("min", keys=("a", "b"))
    assert "'a', 'b'" in str(error.value)


def test_what_is_passed_is_read(tmp_path):
    """An explicit metric is taken as it is."""
    callback = dl.SchedulerCallback(monitor="valid/accuracy")
    told, metrics = fit("min", callback, logdir=tmp_path, **LOSS)
    assert told == of(metrics, "valid", "accuracy")


def test_a_scheduler_after_a_warmup_reads_it_too(tmp_path):
    """WarmupLR hands the metric to the scheduler after it."""
    told, metrics = fit("max", warmup_steps=2, logdir=tmp_path, **ACCURACY)
    assert told == of(metrics, "valid", "accuracy")


class TimmLike:
    """A plateau scheduler with the interface of timm's: it is told the epoch, and may be told a metric."""

    def __init__(self, optimizer, mode):
        self.lr_scheduler, self.told = ReduceLROnPlateau(optimizer, mode=mode), []

    def step(self, epoch, metric=None):
        self.told.append((epoch, metric))

    def step_update(self, num_updates, metric=None):
        pass


class Optional(TimmLike):
    """One that reads a metric only if there is one."""

    def __init__(self, optimizer):
        self.told = []

    def step(self, metrics=None):
        self.told.append(metrics)


def test_a_metric_that_a_scheduler_may_be_told_is_told():
    """The one that selects the best checkpoint; of a direction that a plateau scheduler waits for."""
    model = mlp()
    optimizer = sgd(model)
    options = {"loaders": {"train": loader(16, 4), "valid": loader(8, 4, seed=1)}, "num_epochs": 3}

    scheduler, optional = TimmLike(optimizer, "min"), Optional(optimizer)
    losses = of(train(model, optimizer=optimizer, scheduler=scheduler, **options).experiment_metrics, "valid", "loss")
    assert scheduler.told == [(1, losses[0]), (2, losses[1]), (3, losses[2])]
    losses = of(train(model, optimizer=optimizer, scheduler=optional, **options).experiment_metrics, "valid", "loss")
    assert optional.told == losses
    with pytest.raises(ValueError, match=r"TimmLike\(mode='max'\) would read 'loss'"):
        train(model, optimizer=optimizer, scheduler=TimmLike(optimizer, "max"), **options)


def test_a_metric_that_is_not_known_is_not_told():
    """With several evaluation loaders, and where the loader is left out of an epoch; a plateau scheduler asks which."""
    model = mlp()
    optimizer = sgd(model)
    loaders = {"train": loader(16, 4), "a": loader(8, 4, seed=1), "b": loader(8, 4, seed=2)}
    options = {"loaders": loaders, "num_epochs": 2}

    train(model, optimizer=optimizer, scheduler=(optional := Optional(optimizer)), **options)
    assert optional.told == [None, None]
    every_second = [dl.PeriodicLoaderCallback(monitor="b/loss", a=2), dl.SchedulerCallback(monitor="a/loss")]
    scheduler = TimmLike(optimizer, "min")
    train(model, optimizer=optimizer, scheduler=scheduler, callbacks=every_second, **options)
    assert [metric is not None for _, metric in scheduler.told] == [False, True]
    with pytest.raises(ValueError, match="needs the metric of one of the loaders"):
        train(model, optimizer=optimizer, scheduler=TimmLike(optimizer, "min"), **options)


class Timm(TimmLike):
    """Like timm's PlateauLRScheduler, whose state lacks how many epochs were bad."""

    def step(self, epoch, metric=None):
        self.lr_scheduler.step(metric)

    def state_dict(self):
        return {"best": self.lr_scheduler.best}

    def load_state_dict(self, state):
        self.lr_scheduler.best = state["best"]


@pytest.mark.parametrize("warmup_epochs", [0, 1])
def test_a_resumed_run_keeps_the_patience_of_a_plateau_scheduler_inside_another(tmp_path, warmup_epochs):
    """The rate falls in the epoch in which it would have without the interruption."""

    def fit(name, num_epochs, **options):
        model = mlp()
        optimizer = sgd(model)
        scheduler = Timm(optimizer, "min")
        scheduler.lr_scheduler.patience, scheduler.lr_scheduler.threshold = 2, 1.0  # no epoch is better by so much
        if warmup_epochs:
            scheduler = dl.WarmupLR(optimizer, num_epochs=1, after=scheduler)
        options |= {"scheduler": scheduler, "loaders": {"train": loader(16, 4), "valid": loader(8, 4)}}
        runner = train(model, optimizer=optimizer, logdir=tmp_path / name, num_epochs=num_epochs, **options)
        return of(runner.experiment_metrics, "train", "lr")

    expected = fit("whole", 5)
    fit("parts", 2 + warmup_epochs)

    assert fit("parts", 5, resume="auto") == expected
    assert expected[-1] < 0.1, "it fell"


def test_after_each_step_a_metric_of_an_evaluation_is_refused():
    """It is not known there; the training metric of that name was read instead."""
    with pytest.raises(ValueError, match=r"'loss' of loader 'valid'.*interval='epoch'"):
        fit("min", dl.SchedulerCallback(monitor="valid/loss", interval="step"))
