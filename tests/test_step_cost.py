"""Tests of a step's overhead over a hand-written loop, counted in function calls because times are noisy."""

import io
import os
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.calls import calls_per_step
from runnerkit import dl
from tests.tiny import classification, mlp, sgd, train

BATCHES = list(DataLoader(classification(150 * 4), batch_size=4))
# The allowance above the budgets, which were counted with torch 2.13. In other versions `zero_grad`, which only the
# hand-written loop calls, makes up to eight calls fewer.
MARGIN = 2 if torch.__version__.startswith("2.13.") else 8


def by_hand(num_steps, accuracy=False, batches=None):
    model = mlp(dropout=0.0)
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss()
    total, hits = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for features, targets in BATCHES[:num_steps] if batches is None else batches:
        optimizer.zero_grad()
        logits = model(features)
        loss = criterion(logits, targets)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(targets)
        if accuracy:
            hits += (logits.argmax(1) == targets).sum()


def evaluate_by_hand(num_batches):
    model, criterion = mlp(dropout=0.0).eval(), nn.CrossEntropyLoss()
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for features, targets in BATCHES[:num_batches]:
            total += criterion(model(features), targets) * len(targets)


def ours(num_steps, *callbacks, runner=dl.SupervisedRunner, num_valid=0, batches=None, **options):
    loaders = {"train": BATCHES[:num_steps] if batches is None else batches}
    if num_valid:
        loaders["valid"] = BATCHES[:num_valid]
    train(mlp(dropout=0.0), runner=runner(), loaders=loaders, callbacks=list(callbacks), **options)


class Quiet(dl.Runner):
    def handle_batch(self, batch):
        features, targets = batch
        self.optimizer.zero_grad()
        self.criterion(self.model(features), targets).backward()
        self.optimizer.step()


@pytest.mark.parametrize(
    ("train", "budget"),
    [
        (lambda num_steps: ours(num_steps, runner=Quiet), 5),
        (ours, -3),
        (lambda num_steps: ours(num_steps, dl.AccuracyCallback("logits", "targets")), 11),
    ],
    ids=["nothing logged", "loss", "loss and accuracy"],
)
def test_a_step_keeps_to_its_budget_of_calls(train, budget):
    """A step makes at most `budget` more calls of Python functions and builtins than the hand-written loop."""
    assert calls_per_step(train) - calls_per_step(by_hand) <= budget + MARGIN


class Rows(Dataset):
    """Map-style data set that draws nothing and does not say so."""

    def __init__(self, num_steps):
        self.num_steps = num_steps

    def __len__(self):
        return 4 * self.num_steps

    def __getitem__(self, index):
        features, targets = BATCHES[index // 4]
        return features[index % 4], targets[index % 4]


class BatchStream(IterableDataset):
    """Stream of batches that draws nothing and does not say so."""

    def __init__(self, num_steps):
        self.num_steps = num_steps

    def __iter__(self):
        yield from BATCHES[: self.num_steps]


@pytest.mark.parametrize(
    ("load", "budget"),
    [
        (lambda num_steps: DataLoader(Rows(num_steps), batch_size=4, shuffle=True), 23),
        (lambda num_steps: DataLoader(BatchStream(num_steps), batch_size=None), 19),
    ],
    ids=["map-style", "stream of batches"],
)
def test_looking_whether_data_draw_keeps_to_its_budget_of_calls(load, budget):
    """Data that may draw random numbers add a limited number of calls to those of torch's own loader."""

    def raw(num_steps):
        by_hand(num_steps, batches=load(num_steps))

    def trained(num_steps):
        ours(num_steps, batches=load(num_steps))

    assert calls_per_step(trained) - calls_per_step(raw) <= budget + MARGIN


def cycle(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1)


def test_a_scheduler_for_each_batch_keeps_to_its_budget_of_calls():
    """A scheduler stepped per batch adds a limited number of calls to its own."""

    def step_by_hand(num_steps, is_scheduled=True):
        optimizer = sgd(mlp())
        scheduler = cycle(optimizer) if is_scheduled else None
        for _ in range(num_steps):
            optimizer.step()
            if scheduler:
                scheduler.step()

    def scheduled(num_steps):
        model = mlp(dropout=0.0)
        optimizer = sgd(model)
        train(model, optimizer=optimizer, scheduler=cycle(optimizer), loaders={"train": BATCHES[:num_steps]})

    own = calls_per_step(step_by_hand) - calls_per_step(partial(step_by_hand, is_scheduled=False))
    assert calls_per_step(scheduled) - calls_per_step(ours) - own <= 10 + MARGIN


def test_a_batch_of_evaluation_keeps_to_its_budget_of_calls():
    """A batch of evaluation makes a limited number of calls more than the hand-written loop with the loss."""

    def evaluate(num_batches):
        ours(1, num_valid=num_batches)

    assert calls_per_step(evaluate) - calls_per_step(evaluate_by_hand) <= 26 + MARGIN


def test_logs_of_steps_and_a_progress_bar_keep_to_theirs(tmp_path, monkeypatch):
    """Step logs to CSV and TensorBoard and a progress bar, between its refreshes, add a limited number of calls."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def logged(num_steps):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        kinds = {"csv": dl.CSVLogger, "tensorboard": dl.TensorboardLogger}
        files = {name: kind(folder, log_batch_metrics=True) for name, kind in kinds.items()}
        ours(num_steps, dl.AccuracyCallback("logits", "targets"), loggers=files, log_every=10)

    def with_bar(num_steps):
        ours(num_steps, verbose=True)

    assert calls_per_step(logged) - calls_per_step(by_hand) <= 26 + MARGIN
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setattr("runnerkit.callbacks.monitor.progress.REFRESH_S", 1e9)
    assert calls_per_step(with_bar) - calls_per_step(by_hand) <= 2 + MARGIN
    assert "Epoch (train)" in terminal.getvalue()


def test_a_dashboard_keeps_to_its_own(monkeypatch):
    """The dashboard adds a few calls per step between its refreshes."""
    rich_console = pytest.importorskip("rich.console")
    console = partial(rich_console.Console, file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(rich_console, "Console", console)
    monkeypatch.setattr("runnerkit.callbacks.monitor.dashboard.REFRESH_S", 1e9)

    with_dashboard = calls_per_step(lambda num_steps: ours(num_steps, dl.RichDashboardCallback()))

    assert with_dashboard - calls_per_step(ours) < 5


def test_callbacks_cost_what_they_call_and_nothing_beside():
    """Callbacks without step events cost no calls, and each callback with one costs one call."""

    class Idle(dl.Callback):
        def on_epoch_end(self, runner):
            pass

    class Acting(dl.Callback):
        def on_batch_end(self, runner):
            pass

    alone = calls_per_step(ours)
    for kind, allowed in ((Idle, 5), (Acting, 55)):
        callbacks = [kind(0) for _ in range(50)]
        assert calls_per_step(lambda num_steps, more=callbacks: ours(num_steps, *more)) < alone + allowed


def test_neither_a_step_nor_a_batch_of_evaluation_touches_a_file(tmp_path):
    """With CSV, TensorBoard and checkpoints per epoch, no step opens a file or makes a call of the os module."""

    def fit(num_steps):
        seen = Counter()

        def note(frame, event, argument):
            if event == "c_call" and (argument.__module__ == os.stat.__module__ or argument is open):
                seen[argument.__name__] += 1

        logdir = tmp_path / str(num_steps)
        sys.setprofile(note)
        try:
            ours(num_steps, num_valid=num_steps, loggers={"console": dl.ConsoleLogger()}, logdir=logdir, verbose=False)
        finally:
            sys.setprofile(None)
        return seen

    fit(3)
    few, many = fit(50), fit(150)
    assert few["open"] and few == many
