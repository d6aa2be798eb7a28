"""A schedule of another length than the run is noticed before training."""

import logging

import pytest
from torch import nn
from torch.optim import lr_scheduler

from runnerkit import dl
from tests.tiny import mlp, sgd, train

NUM_STEPS = 12  # 3 epochs of 4 batches


def run(scheduler, **options):
    """Train with a schedule that `scheduler` makes for the optimizer, for 12 steps in 3 epochs."""
    model = mlp()
    optimizer = sgd(model)
    return train(model, optimizer=optimizer, scheduler=scheduler(optimizer), num_epochs=3, **options)


def one_cycle(total_steps):
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=total_steps)


def cosine(num_steps):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, num_steps)


def in_turn(first, rest):
    """Return a SequentialLR of a warm-up and a one-cycle schedule of so many steps."""

    def make(optimizer):
        parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=first), one_cycle(rest)(optimizer)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[first])

    return make


def warmed(first, rest):
    return lambda optimizer: dl.WarmupLR(optimizer, num_steps=first, after=one_cycle(rest)(optimizer))


STEPPED = {"callbacks": [dl.SchedulerCallback(interval="step")]}
EPOCHS = {"scheduler_interval": "epoch"}
HALVED = {"accumulation_steps": 2}


@pytest.mark.parametrize(
    ("scheduler", "settings", "words"),
    [
        (one_cycle(11), {}, "OneCycleLR.*total_steps=11.*12 optimizer steps.*pass total_steps=12"),
        (one_cycle(8), {"num_steps": 10}, "pass total_steps=10"),
        (one_cycle(5), HALVED, "pass total_steps=6"),
        (one_cycle(2), {"callbacks": [dl.SchedulerCallback(interval="epoch")]}, "3 epochs.*pass total_steps=3"),
        (in_turn(4, 7), STEPPED, "pass total_steps=8"),
        (warmed(4, 7), STEPPED, "pass total_steps=8"),
    ],
)
def test_a_schedule_that_is_too_short_is_refused(scheduler, settings, words, tmp_path):
    """It is refused before training, with the number to write; torch raises at the step after its last."""
    with pytest.raises(ValueError, match=words):
        run(scheduler, logdir=tmp_path, **settings)

    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize(
    ("scheduler", "settings", "words"),
    [
        (one_cycle(24), {}, "OneCycleLR(total_steps=24).*12 optimizer steps.*pass total_steps=12"),
        (one_cycle(12), HALVED, "pass total_steps=6"),
        (cosine(24), STEPPED, "CosineAnnealingLR(T_max=24).*12 optimizer steps.*pass T_max=12"),
        (cosine(12), EPOCHS, "CosineAnnealingLR(T_max=12).*3 epochs.*pass T_max=3.*scheduler_interval='step'"),
        (cosine(3), STEPPED, "CosineAnnealingLR(T_max=3).*12 optimizer steps.*pass T_max=12"),
        (in_turn(4, 12), STEPPED, "pass total_steps=8"),
        (warmed(4, 12), STEPPED, "pass total_steps=8"),
        (warmed(16, 12), STEPPED, "warm-up.*16.*12 optimizer steps"),
    ],
)
def test_a_schedule_that_does_not_end_with_the_run_is_warned_about(scheduler, settings, words, caplog):
    """One warning has the lengths of both and the number to write."""
    run(scheduler, **settings)

    [warning] = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    for part in words.split(".*"):
        assert part in warning


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        (one_cycle(12), {}),
        (one_cycle(13), {}),  # the last step has the last rate
        (one_cycle(6), HALVED),
        (one_cycle(3), {"callbacks": [dl.SchedulerCallback(interval="epoch")]}),
        (cosine(3), {}),
        (cosine(2), {}),
        (cosine(4), STEPPED),
        (lambda each: lr_scheduler.CosineAnnealingWarmRestarts(each, 4), STEPPED),
        (in_turn(4, 8), STEPPED),
        (warmed(4, 8), STEPPED),
        (lambda each: lr_scheduler.LinearLR(each, total_iters=20), {}),
        (lambda each: lr_scheduler.StepLR(each, 30), {}),
    ],
)
def test_other_schedules_are_left_alone(scheduler, settings, caplog):
    run(scheduler, **settings)

    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == []


class TwoPaces(dl.Runner):
    """Two optimizers, of which `handle_batch` steps the second in every fourth batch only."""

    def handle_batch(self, batch):
        features, targets = batch
        for key, optimizer in self.optimizer.items():
            if key == "often" or self.loader_batch_step == 4:
                optimizer.zero_grad()
                self.engine.backward(nn.functional.cross_entropy(self.model(features), targets))
                self.engine.step(optimizer)


def test_an_optimizer_that_handle_batch_steps_now_and_then_is_not_judged():
    """Nobody knows how often it steps, so that a short schedule may be right."""
    model = mlp()
    optimizer = {key: sgd(model) for key in ("often", "rarely")}

    scheduler, callbacks = {"rarely": one_cycle(3)(optimizer["rarely"])}, [dl.SchedulerCallback("rarely")]

    options = {"scheduler": scheduler, "callbacks": callbacks, "num_epochs": 3}
    runner = train(model, runner=TwoPaces(), optimizer=optimizer, **options)

    assert runner.scheduler["rarely"].last_epoch == 3


@pytest.mark.slow  # starts processes
def test_steps_of_two_processes_are_counted(capfd):
    """A schedule made for the steps of one process is too long for those of two, which is said once."""
    run(one_cycle(NUM_STEPS), num_processes=2)

    shown = capfd.readouterr().err
    assert shown.count("OneCycleLR") == 1
    assert "6 optimizer steps" in shown and "pass total_steps=6" in shown
