"""Runs whose learning rates are read, runners that step in different ways, and a hand-written loop beside them."""

import inspect

from torch import nn
from torch.optim import lr_scheduler

from runnerkit import dl
from tests.interrupt import at
from tests.tiny import mlp, sgd, train

NUM_EPOCHS, PER_EPOCH = 3, 4  # of train()'s default loader
NUM_STEPS = NUM_EPOCHS * PER_EPOCH


class Own(dl.Runner):
    """A runner with a loss, whose steps callbacks make."""

    def handle_batch(self, batch):
        features, targets = batch
        self.batch_metrics["loss"] = nn.functional.cross_entropy(self.model(features), targets)


class Learns(dl.Runner):
    """A runner that makes its steps itself, with learn()."""

    steps_itself = True

    def handle_batch(self, batch):
        features, targets = batch
        self.learn(nn.functional.cross_entropy(self.model(features), targets))


class Steps(dl.Runner):
    """A runner that makes its steps in `handle_batch`, and the scheduler's if `steps_scheduler`."""

    steps_scheduler = False

    def handle_batch(self, batch):
        features, targets = batch
        self.optimizer.zero_grad()
        self.engine.backward(nn.functional.cross_entropy(self.model(features), targets))
        self.engine.step(self.optimizer)
        if self.steps_scheduler:
            self.scheduler.step()


class OwnUnit(Steps):
    steps_scheduler = True
    scheduler_interval = "manual"


def by_callbacks(*more):
    return {"runner": Own(), "callbacks": [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss"), *more]}


class TimmLike:
    """A schedule like timm's: linear down to 0 over `t_initial` units."""

    def __init__(self, optimizer, t_initial, *, t_in_epochs=True):
        self.optimizer, self.t_initial, self.t_in_epochs = optimizer, t_initial, t_in_epochs

    def _set(self, t):
        self.optimizer.param_groups[0]["lr"] = 0.1 * max(0.0, 1 - t / self.t_initial)

    def step(self, epoch, metric=None):
        if self.t_in_epochs:
            self._set(epoch)

    def step_update(self, num_updates, metric=None):
        if not self.t_in_epochs:
            self._set(num_updates)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def rates_of_run(scheduler, *, is_function=False, runner=None, callbacks=(), **options):
    """Return the rate of each optimizer step of a run."""
    rates = []
    note = at("on_batch_start", lambda runner: rates.append(float(runner.optimizer.param_groups[0]["lr"])))
    model = mlp()
    optimizer = sgd(model)
    given = scheduler if is_function else scheduler(optimizer)
    options = {"num_epochs": NUM_EPOCHS, "callbacks": [*callbacks, note], "scheduler": given, **options}
    train(model, runner=runner, optimizer=optimizer, **options)
    return rates


def rates_by_hand(make, unit, *, num_steps=NUM_STEPS):
    """Return the rates of a hand-written loop that steps the scheduler in `unit`."""
    optimizer = sgd(mlp())
    scheduler, rates = make(optimizer), []
    for step in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        is_end = (step + 1) % PER_EPOCH == 0
        count = step + 1 if unit == "step" else (step + 1) // PER_EPOCH
        if unit == "step" or is_end:
            takes_epoch = "epoch" in inspect.signature(scheduler.step).parameters and hasattr(scheduler, "t_initial")
            scheduler.step(count) if takes_epoch else scheduler.step()
    return rates


def halve(optimizer):
    return lr_scheduler.StepLR(optimizer, 2, 0.5)


def halve_of(optimizer, num_steps):
    return halve(optimizer)


def one_cycle(optimizer, num_steps=NUM_STEPS):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=num_steps + 1)


def chained(optimizer):
    return lr_scheduler.ChainedScheduler([halve(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)])
