"""A step costs a few calls more than the loop written by hand: counted, since times are as noisy as the machine."""

import io
import os
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.calls import calls_per_step
from runnerkit import dl
from tests.tiny import classification, mlp, sgd

BATCHES = list(DataLoader(classification(150 * 4), batch_size=4))
MARGIN = 2  # budgets are what was counted, and so many more


def by_hand(num_steps, accuracy=False):
    """Train, and sum up the loss, as a careful user does."""
    model = mlp(dropout=0.0)
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss()
    total, hits = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for features, targets in BATCHES[:num_steps]:
        optimizer.zero_grad()
        logits = model(features)
        loss = criterion(logits, targets)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(targets)
        if accuracy:
            hits += (logits.argmax(1) == targets).sum()


def evaluate_by_hand(num_batches):
    """Sum up the loss, as in training."""
    model, criterion = mlp(dropout=0.0).eval(), nn.CrossEntropyLoss()
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for features, targets in BATCHES[:num_batches]:
            total += criterion(model(features), targets) * len(targets)


def ours(num_steps, *callbacks, runner=dl.SupervisedRunner, num_valid=0, **options):
    model = mlp(dropout=0.0)
    runner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={"train": BATCHES[:num_steps], **({"valid": BATCHES[:num_valid]} if num_valid else {})},
        callbacks=list(callbacks),
        engine=dl.CPUEngine(),
        **{"loggers": {"console": None}, **options},
    )


class Quiet(dl.Runner):
    """Logs nothing, and steps by itself."""

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
    """Python functions and builtins, over those of the loop by hand that sums up the loss."""
    assert calls_per_step(train) - calls_per_step(by_hand) <= budget + MARGIN


def cycle(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1)


def test_a_scheduler_for_each_batch_keeps_to_its_budget_of_calls():
    """Over its own, and over a step without: no signature is read and no list of filters copied at a step."""

    def step_by_hand(num_steps):
        optimizer = sgd(mlp())
        scheduler = cycle(optimizer)
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step()

    def scheduled(num_steps):
        model = mlp(dropout=0.0)
        optimizer = sgd(model)
        dl.SupervisedRunner().train(
            model=model, criterion=nn.CrossEntropyLoss(), optimizer=optimizer, scheduler=cycle(optimizer),
            loaders={"train": BATCHES[:num_steps]}, engine=dl.CPUEngine(), loggers={"console": None},
        )  # fmt: skip

    def only_optimizer(num_steps):
        optimizer = sgd(mlp())
        for _ in range(num_steps):
            optimizer.step()

    own = calls_per_step(step_by_hand) - calls_per_step(only_optimizer)
    assert calls_per_step(scheduled) - calls_per_step(ours) - own <= 10 + MARGIN


def test_a_batch_of_evaluation_keeps_to_its_budget_of_calls():
    """Over those of the loop by hand, with the loss in both."""

    def evaluate(num_batches):
        ours(1, num_valid=num_batches)

    assert calls_per_step(evaluate) - calls_per_step(evaluate_by_hand) <= 26 + MARGIN


def test_logs_of_steps_and_a_progress_bar_keep_to_theirs(tmp_path, monkeypatch):
    """Each 10th step to CSV and TensorBoard; a bar that counts, between the moments in which it is drawn."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def logged(num_steps):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        files = {
            "csv": dl.CSVLogger(folder, log_batch_metrics=True),
            "tensorboard": dl.TensorboardLogger(folder, log_batch_metrics=True),
        }
        ours(num_steps, dl.AccuracyCallback("logits", "targets"), loggers={"console": None, **files}, log_every=10)

    def with_bar(num_steps):
        ours(num_steps, verbose=True)

    assert calls_per_step(logged) - calls_per_step(by_hand) <= 24 + MARGIN
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setattr("runnerkit.callbacks.progress.REFRESH_S", 1e9)
    assert calls_per_step(with_bar) - calls_per_step(by_hand) <= 2 + MARGIN
    assert "Epoch (train)" in terminal.getvalue()


def test_a_dashboard_keeps_to_its_own(monkeypatch):
    """Between the moments in which it is drawn."""
    rich_console = pytest.importorskip("rich.console")
    console = partial(rich_console.Console, file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(rich_console, "Console", console)
    monkeypatch.setattr("runnerkit.callbacks.dashboard.REFRESH_S", 1e9)

    with_dashboard = calls_per_step(lambda num_steps: ours(num_steps, dl.RichDashboardCallback()))

    assert (
        round(with_dashboard - calls_per_step(ours)) == 2
    )  # its own, and the clock's; larger numbers are longer texts


def test_callbacks_cost_what_they_call_and_nothing_beside():
    """Fifty that act in no step cost nothing; of those that act each costs its own call."""

    class Idle(dl.Callback):
        def on_epoch_end(self, runner):
            pass

    class Acting(dl.Callback):
        def on_batch_end(self, runner):
            pass

    alone = calls_per_step(ours)
    assert calls_per_step(lambda num_steps: ours(num_steps, *(Idle(0) for _ in range(50)))) == alone
    assert calls_per_step(lambda num_steps: ours(num_steps, *(Acting(0) for _ in range(50)))) == alone + 50


def test_neither_a_step_nor_a_batch_of_evaluation_touches_a_file(tmp_path):
    """Nor asks the system for anything else; with CSV and TensorBoard logs, and checkpoints of the epoch."""

    def train(num_steps):
        seen = Counter()

        def note(frame, event, argument):
            if event == "c_call" and (argument.__module__ == os.stat.__module__ or argument is open):
                seen[argument.__name__] += 1

        logdir = tmp_path / str(num_steps)
        sys.setprofile(note)
        try:
            ours(num_steps, num_valid=num_steps, loggers={}, logdir=logdir, verbose=False)
        finally:
            sys.setprofile(None)
        return seen

    train(3)
    few, many = train(50), train(150)
    assert few["open"] and few == many
