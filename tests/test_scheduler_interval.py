"""A scheduler is stepped in one unit, which is stated or known: learning rates against a hand-written loop."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from runnerkit import dl
from tests.schedules import (
    NUM_EPOCHS,
    NUM_STEPS,
    PER_EPOCH,
    Learns,
    OwnUnit,
    Steps,
    TimmLike,
    by_callbacks,
    chained,
    halve,
    halve_of,
    one_cycle,
    rates_by_hand,
    rates_of_run,
)
from tests.tiny import loader, mlp, sgd, train


@pytest.mark.parametrize(
    ("make", "options", "unit"),
    [
        (halve, {}, "epoch"),
        (halve, {"scheduler_interval": "epoch"}, "epoch"),
        (halve, {"scheduler_interval": "step"}, "step"),
        (halve, {"callbacks": [dl.SchedulerCallback()]}, "epoch"),
        (halve, {"callbacks": [dl.SchedulerCallback(interval="step")]}, "step"),
        (halve, {"callbacks": [dl.SchedulerCallback()], "scheduler_interval": "step"}, "step"),
        (halve, by_callbacks(), "epoch"),
        (halve, {**by_callbacks(), "scheduler_interval": "step"}, "step"),
        (halve, {"runner": Learns()}, "epoch"),
        (halve, {"runner": Learns(), "scheduler_interval": "step"}, "step"),
        (halve, {"runner": Steps(), "scheduler_interval": "step"}, "step"),
        (halve, {"runner": Steps(), "scheduler_interval": "epoch"}, "epoch"),
        (halve, {"runner": OwnUnit()}, "step"),
        (chained, {}, "epoch"),
        (chained, {"scheduler_interval": "step"}, "step"),
        (one_cycle, {}, "step"),
        (one_cycle, by_callbacks(), "step"),
        (partial(one_cycle, num_steps=NUM_EPOCHS), {"scheduler_interval": "epoch"}, "epoch"),
        (partial(TimmLike, t_initial=NUM_EPOCHS), {}, "epoch"),
    ],
)
def test_an_object_is_stepped_in_its_unit(make, options, unit):
    """After each epoch, except for cycles of steps and where the unit is given; in any kind of runner."""
    assert rates_of_run(make, **options) == rates_by_hand(make, unit)


@pytest.mark.parametrize(
    ("make", "options", "unit"),
    [
        (halve_of, {}, "step"),
        (halve_of, {"scheduler_interval": "epoch"}, "epoch"),
        (halve_of, {"callbacks": [dl.SchedulerCallback()]}, "step"),
        (halve_of, {"callbacks": [dl.SchedulerCallback(interval="epoch")]}, "epoch"),
        (halve_of, by_callbacks(), "step"),
        (halve_of, by_callbacks(dl.SchedulerCallback()), "step"),
        (halve_of, {"runner": Learns()}, "step"),
        (halve_of, {"runner": Steps(), "scheduler_interval": "step"}, "step"),
        (partial(dl.cosine_with_warmup, warmup_steps=4), {}, "step"),
        (partial(dl.cosine_with_warmup, warmup_steps=4), by_callbacks(), "step"),
    ],
)
def test_a_function_is_told_the_steps_and_makes_a_scheduler_of_steps(make, options, unit):
    expected = rates_by_hand(lambda optimizer: make(optimizer, NUM_STEPS), unit)

    assert rates_of_run(make, is_function=True, **options) == expected


def test_a_function_may_make_a_scheduler_that_needs_a_metric_or_an_epoch():
    """It is stepped after each epoch, also after a warm-up in steps."""

    def warmed_plateau(optimizer, num_steps):
        after = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs")
        return dl.WarmupLR(optimizer, num_steps=2, after=after)

    plateau = rates_of_run(warmed_plateau, is_function=True)
    timm = rates_of_run(lambda optimizer, _: TimmLike(optimizer, NUM_EPOCHS), is_function=True)

    assert plateau == [0.0, 0.05] + [0.1] * 6 + [0.05] * 4  # the first loss after the warm-up is the best one
    assert timm == rates_by_hand(partial(TimmLike, t_initial=NUM_EPOCHS), "epoch")


def test_timms_schedule_of_updates_is_told_them():
    make = partial(TimmLike, t_initial=NUM_STEPS)

    found = rates_of_run(partial(make, t_in_epochs=False))

    assert found == rates_by_hand(make, "step")


def test_accumulated_batches_are_one_step():
    make = partial(lr_scheduler.ExponentialLR, gamma=0.5)

    found = rates_of_run(make, scheduler_interval="step", accumulation_steps=2)

    assert found == [each for each in rates_by_hand(make, "step", num_steps=6) for _ in range(2)]


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
def test_each_of_several_schedulers_is_stepped(interval):
    """One callback for each is added, beside those that are passed."""

    class Two(dl.Runner):
        def handle_batch(self, batch):
            features, targets = batch
            for key, model in self.model.items():
                self.batch_metrics[f"loss_{key}"] = nn.functional.cross_entropy(model(features), targets)

    models = {"a": mlp(), "b": mlp()}
    optimizers = {key: sgd(model) for key, model in models.items()}
    schedulers = {key: lr_scheduler.ExponentialLR(each, 0.5) for key, each in optimizers.items()}
    callbacks = [
        each
        for key in "ab"
        for each in (dl.BackwardCallback(f"loss_{key}"), dl.OptimizerCallback(f"loss_{key}", key, key))
    ]
    callbacks.append(dl.SchedulerCallback("b"))

    train(
        models, runner=Two(), optimizer=optimizers, scheduler=schedulers, callbacks=callbacks, num_epochs=2,
        scheduler_interval=interval,
    )  # fmt: skip

    num_times = 2 * PER_EPOCH if interval == "step" else 2
    for each in optimizers.values():
        assert each.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**num_times)


def cosine(optimizer, num_units=NUM_STEPS):
    return lr_scheduler.CosineAnnealingLR(optimizer, num_units)


def in_turn(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4), cosine(optimizer, NUM_STEPS - 4)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def of_transformers(optimizer, num_training_steps=NUM_STEPS):
    """Return what ``get_linear_schedule_with_warmup`` of transformers 5 does."""

    def rate(current_step, *, num_warmup_steps, num_training_steps):
        if current_step < num_warmup_steps:
            return current_step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - current_step) / max(1, num_training_steps - num_warmup_steps))

    told = partial(rate, num_warmup_steps=2, num_training_steps=num_training_steps)
    return lr_scheduler.LambdaLR(optimizer, told, -1)


TOTAL = NUM_STEPS


def of_closure(optimizer, total=NUM_STEPS):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)


def of_global(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / TOTAL)


class Decay:
    def __init__(self, length):
        self.length = length

    def __call__(self, step):
        return 1 - step / self.length

    rate = __call__


class Config:
    """Settings with a schedule that does not read all of them."""

    factor = 0.9

    def __init__(self):
        self.batch_size = NUM_STEPS

    def rate(self, epoch):
        return self.factor**epoch


def after_a_warmup(optimizer):
    """Warm up for 12 epochs, of which the run takes 3."""
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=NUM_STEPS), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[NUM_STEPS])


FOR_STEPS = {
    "CosineAnnealingLR": cosine,
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=NUM_STEPS),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=NUM_STEPS),
    "cosine_with_warmup": partial(dl.cosine_with_warmup, num_steps=NUM_STEPS, warmup_steps=4),
    "SequentialLR": in_turn,
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler([cosine(optimizer), halve(optimizer)]),
    "chained in turn": lambda optimizer: lr_scheduler.ChainedScheduler([in_turn(optimizer)]),
    "transformers": of_transformers,
    "a closure": of_closure,
    "a global": of_global,
    "an object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay(NUM_STEPS)),
    "a method": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay(NUM_STEPS).rate),
}


@pytest.mark.parametrize("make", FOR_STEPS.values(), ids=FOR_STEPS)
def test_a_schedule_made_for_the_steps_of_the_run_is_not_stepped_per_epoch(make, tmp_path):
    """It would barely move; the error says what to write, and with it the rates are those of a hand-written loop."""
    with pytest.raises(
        ValueError, match=r"stepped after each epoch.*all 12 optimizer steps.*scheduler_interval='step'"
    ):
        rates_of_run(make, logdir=tmp_path)
    assert not list(tmp_path.rglob("*.csv"))

    found = rates_of_run(make, scheduler_interval="step")

    assert found == pytest.approx(rates_by_hand(make, "step"), abs=1e-12)


@pytest.mark.parametrize("make", FOR_STEPS.values(), ids=FOR_STEPS)
def test_a_unit_that_is_given_is_taken(make):
    """As many epochs may be meant; then the schedule is longer than the run."""
    rates = rates_of_run(make, scheduler_interval="epoch")

    assert len(rates) == NUM_STEPS and len(set(rates)) >= NUM_EPOCHS - 1


def test_timms_schedule_of_steps_is_not_stepped_per_epoch():
    """The error names the argument of timm."""
    with pytest.raises(ValueError, match=r"TimmLike\(t_initial=12\).*12 optimizer steps.*t_in_epochs=False"):
        rates_of_run(partial(TimmLike, t_initial=NUM_STEPS))


def test_a_schedule_made_for_batches_that_are_accumulated_is_found():
    """Users count batches, of which a step takes two."""
    with pytest.raises(ValueError, match=r"CosineAnnealingLR\(T_max=12\).*all 12 batches of the run"):
        rates_of_run(cosine, accumulation_steps=2)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (partial(cosine, num_units=NUM_EPOCHS), {}),
        (partial(of_closure, total=NUM_EPOCHS), {}),
        (partial(of_closure, total=NUM_STEPS + 1), {}),
        (partial(cosine, num_units=3), {"loaders": {"train": loader(16, 16)}}),  # an epoch is a step
        (halve, {"num_epochs": None, "num_steps": NUM_STEPS}),
        (partial(TimmLike, t_initial=NUM_STEPS, t_in_epochs=False), {}),
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, Config().rate), {}),
        (after_a_warmup, {}),
    ],
)
def test_other_schedules_are_left_alone(make, options, caplog):
    rates_of_run(make, **options)

    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_run_of_less_than_an_epoch_says_that_the_rate_stays(caplog):
    """Once, when it starts: a trial of a few steps needs no other argument than the whole run."""
    assert rates_of_run(halve, num_epochs=None, num_steps=3) == [0.1] * 3

    [warning] = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert "ends after 3 of the 4 optimizer steps" in warning and "scheduler_interval='step'" in warning
    assert rates_of_run(halve, num_epochs=None, num_steps=3, scheduler_interval="epoch") == [0.1] * 3
    assert rates_of_run(halve, num_epochs=None, num_steps=3, scheduler_interval="step") == [0.1, 0.1, 0.05]


def test_a_stream_that_does_not_end_leaves_a_warning(caplog):
    """Its length is not known before."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from loader(64, None).dataset

    endless = torch.utils.data.DataLoader(Stream(), batch_size=4)
    rates_of_run(halve, num_epochs=None, num_steps=5, loaders={"train": endless})

    [warning] = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert "one epoch of 5 optimizer steps" in warning and "scheduler_interval='step'" in warning


def test_the_last_interval_does_not_stay(tmp_path):
    """Each call of train states its own."""
    runner = dl.SupervisedRunner()

    first = rates_of_run(halve, runner=runner, scheduler_interval="step")
    second = rates_of_run(halve, runner=runner)

    assert (first, second) == (rates_by_hand(halve, "step"), rates_by_hand(halve, "epoch"))


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_resumed_run_keeps_the_unit(interval, tmp_path):
    whole = rates_of_run(halve, scheduler_interval=interval)

    first = rates_of_run(halve, scheduler_interval=interval, num_epochs=1, logdir=tmp_path)
    rest = rates_of_run(halve, scheduler_interval=interval, logdir=tmp_path, resume="auto")

    assert first + rest == whole


def test_an_interval_that_is_set_in_init_is_kept():
    """As one of the class is; an argument precedes it for one call."""

    class InInit(dl.SupervisedRunner):
        def __init__(self):
            super().__init__()
            self.scheduler_interval = "step"

    runner = InInit()
    for given, unit in ((None, "step"), ("epoch", "epoch"), (None, "step")):
        assert rates_of_run(halve, runner=runner, scheduler_interval=given) == rates_by_hand(halve, unit)


@pytest.mark.parametrize("interval", ["step", "manual"])
def test_a_second_run_keeps_the_interval_of_train(interval):
    """It repeats the training with the same arguments: the rates of both are those of one schedule."""
    rates = []

    class Manual(dl.SupervisedRunner):
        def on_epoch_end(self, runner):
            if interval == "manual":
                self.scheduler.step()
            rates.append(self.optimizer.param_groups[0]["lr"])

    model = mlp()
    optimizer = sgd(model, lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    options = {"scheduler": scheduler, "scheduler_interval": interval}
    runner = train(model, runner=Manual(), optimizer=optimizer, loaders={"train": loader(8, 4)}, **options)
    runner.run()

    num_steps = 2 if interval == "step" else 1
    assert rates == [0.5**num_steps, 0.25**num_steps]
    assert runner.scheduler_interval is None
