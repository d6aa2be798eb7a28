"""Tests of `runnerkit tune`: the best trial and the config that reproduces it."""

from functools import partial
from pathlib import Path

import optuna
import pytest
from optuna.pruners import ThresholdPruner

from runnerkit import dl, read_metrics
from runnerkit.commands.cli import main
from runnerkit.commands.config import read_config
from runnerkit.commands.search import suggest

CONFIG = """
model: {_target_: tests.tiny.mlp}
criterion: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loaders:
  train: {_target_: tests.tiny.loader, num_samples: 64, batch_size: 8, shuffle: true}
  valid: {_target_: tests.tiny.loader, num_samples: 32, batch_size: 8, seed: 1}
loggers: {console: null}
num_epochs: 2
monitor: valid/loss
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the current folder, which contains config.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    return tmp_path


class UndefinedLoss(dl.Callback):
    """A loss of evaluations that is NaN in some epochs, and 1 / epoch in others."""

    def __init__(self, epochs):
        super().__init__(order=dl.CallbackOrder.Metric)
        self.epochs = epochs

    def on_loader_end(self, runner):
        if not runner.is_train_loader:
            undefined = runner.epoch_step in self.epochs
            runner.loader_metrics["loss"] = float("nan") if undefined else 1 / runner.epoch_step


def best_loss(logdir):
    metrics = read_metrics(logdir)
    return metrics[(metrics["loader"] == "valid") & (metrics["metric"] == "loss")]["value"].min()


def test_the_best_is_found_and_given_again(folder, capsys):
    """The search finds the better of two learning rates, and best.yml reproduces the best trial's loss exactly."""
    words = ["--trials", "4", "--engine", "cpu", "optimizer.lr=1e-9,0.3", "num_epochs=3"]

    assert main(["tune", "config.yaml", *words]) == 0
    assert main(["run", "logs/config-tune/best.yml"]) == 0

    best, chosen, command, rerun = capsys.readouterr().out.splitlines()
    assert chosen == "optimizer.lr=0.3"
    assert (command, rerun) == ("runnerkit run logs/config-tune/best.yml", "logs/best")
    trials = [best_loss(path) for path in sorted(Path("logs/config-tune").glob("trial-*"))]
    assert best_loss("logs/best") == min(trials) and best == f"best: {min(trials):.6g}"
    assert len(trials) == 4 and max(trials) > 1.0


def test_a_bad_trial_is_given_up(folder, monkeypatch):
    """The study's pruner ends a bad trial after its first epoch."""
    monkeypatch.setattr(optuna, "create_study", partial(optuna.create_study, pruner=ThresholdPruner(upper=1.0)))

    assert main(["tune", "config.yaml", "--trials", "6", "--engine", "cpu", "optimizer.lr=1e-9,0.3"]) == 0

    epochs = {path.name: read_metrics(path)["epoch"].max() for path in Path("logs/config-tune").glob("trial-*")}
    rates = {
        name: read_config(Path(f"logs/config-tune/{name}/config.yml")).values["optimizer"]["lr"] for name in epochs
    }
    assert set(rates.values()) == {1e-9, 0.3}
    assert all(epochs[name] == (1 if rate == 1e-9 else 2) for name, rate in rates.items())


def test_what_training_raises_keeps_its_traceback(folder, capsys):
    """An error in a trial is shown with its traceback, with exit code 1; `--trials` must be at least 1."""
    model = "model={_target_: torch.nn.Linear, in_features: 5, out_features: 3}"

    assert main(["tune", "config.yaml", "--trials", "1", "optimizer.lr=0.1,0.2", model]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert main(["tune", "config.yaml", "--trials", "0", "optimizer.lr=1,2"]) == 2
    assert "'--trials'" in capsys.readouterr().err


def test_trials_may_have_several_processes(folder, capsys):
    """A trial can have several processes and is not pruned then."""
    assert main(["tune", "config.yaml", "--trials", "1", "--nproc", "2", "optimizer.lr=0.1,0.2"]) == 0
    assert capsys.readouterr().out.startswith(f"best: {best_loss('logs/config-tune/trial-000'):.6g}\n")


def test_ranges_may_stand_in_the_config(folder, capsys):
    """Ranges in the config are merged with those of the command line and ignored by `run`."""
    Path("config.yaml").write_text(CONFIG + "search: {optimizer.lr: 1e-3..1.0:log, num_epochs: 1..2, seed: [5, 6]}\n")

    assert main(["tune", "config.yaml", "--trials", "2", "num_epochs=2..3"]) == 0
    assert main(["run", "config.yaml"]) == 0

    lines = capsys.readouterr().out.splitlines()
    values = dict(line.split("=") for line in lines[1:4])
    assert 1e-3 <= float(values["optimizer.lr"]) <= 1 and values["num_epochs"] in ("2", "3")
    assert values["seed"] in ("5", "6")
    saved = read_config(Path("logs/config-tune/best.yml")).values
    assert saved["optimizer"]["lr"] == float(values["optimizer.lr"]) and "search" not in saved


def test_a_search_can_be_repeated(folder):
    """A search with the same seed makes the same choices."""
    for logdir in ("one", "other"):
        words = ["--trials", "3", "--logdir", logdir, "optimizer.lr=1e-3..1.0:log", "num_epochs=1"]
        assert main(["tune", "config.yaml", *words]) == 0

    chosen = [[read_config(path).values["optimizer"]["lr"] for path in sorted(Path(name).glob("trial-*/config.yml"))]
              for name in ("one", "other")]  # fmt: skip
    assert chosen[0] == chosen[1] and len(set(chosen[0])) == 3


@pytest.mark.parametrize(
    ("text", "kind", "low", "high", "log"),
    [
        ("1..5", "IntDistribution", 1, 5, False),
        ("0.1..5", "FloatDistribution", 0.1, 5, False),
        ("1e-4..1e-1:log", "FloatDistribution", 1e-4, 1e-1, True),
        ("-2..-1", "IntDistribution", -2, -1, False),
    ],
)
def test_a_range_is_optunas(text, kind, low, high, log):
    """A range becomes an Optuna distribution, of integers if both ends are integers."""
    trial = optuna.create_study().ask()

    suggest(trial, "key", text)

    found = trial.distributions["key"]
    assert (type(found).__name__, found.low, found.high, found.log) == (kind, low, high, log)


def test_choices_are_values_of_the_config(folder):
    """A null, a list, a path with two dots and a number in quotes reach the components of a trial as they are."""
    choices = {
        "none": "[null]",
        "widths": "[[16, 32]]",
        "root": "[../data]",
        "name": '["1e-3"]',
        "marks": '[["]", ")"]]',
        "same": '["a, b"]',
    }
    ranges = ", ".join(f"hparams.{key}: {text}" for key, text in choices.items())
    Path("config.yaml").write_text(f"{CONFIG}hparams: {{note: null}}\nsearch: {{{ranges}}}\n")
    words = ["hparams.folder=../runs", "hparams.layers=[1,2],[1,2]", 'hparams.mark=["]", ")"]', "num_epochs=1"]

    assert main(["tune", "config.yaml", "--trials", "1", "--engine", "cpu", *words]) == 0

    assert read_config(Path("logs/config-tune/best.yml")).values["hparams"] == {
        "note": None, "none": None, "widths": [16, 32], "root": "../data", "name": "1e-3", "marks": ["]", ")"],
        "mark": ["]", ")"], "same": "a, b", "folder": "../runs", "layers": [1, 2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "config.yaml: search: expected ranges, here or on the command line as KEY=LOW..HIGH or KEY=THIS,THAT"),
        (["optimizer.lr=1..0"], "optimizer.lr=1..0: expected LOW..HIGH, LOW..HIGH:log, or choices such as 16,32,64"),
        (["optimizer.lr=0..x"], "optimizer.lr=0..x: expected LOW..HIGH"),
        (["optimizer.lr=1e-3..1.0:lin"], "optimizer.lr=1e-3..1.0:lin: expected LOW..HIGH"),
        (["optimizer.lr=0..1:log"], "optimizer.lr=0..1:log: a logarithmic range must start above 0, got 0"),
        (["optimizer.lr=1,2", "monitor=null"], "config.yaml: monitor: is missing"),
        (["optimizer.lr=1,2", "monitor=valid/mae"], "monitor='valid/mae' needs a mode: write mode='min' if smaller"),
        (["optimizer.lrr=1,2"], "config.yaml: optimizer: torch.optim.sgd.SGD does not accept 'lrr'; it accepts"),
        (["optimizer.lr=1,2", "--logdir", "old"], "old contains the trials of another search: choose another"),
    ],
)
def test_a_search_that_cannot_be_is_one_line(folder, capsys, caplog, arguments, words):
    """Wrong arguments give one line and exit code 2, without a traceback from Optuna."""
    Path("old", "trial-000").mkdir(parents=True)
    optuna.logging.get_logger("optuna").addHandler(caplog.handler)

    assert main(["tune", "config.yaml", *arguments]) == 2

    optuna.logging.get_logger("optuna").removeHandler(caplog.handler)
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1 and not caplog.records


def test_a_loader_may_run_in_some_epochs_only(folder, capsys):
    """The best epoch is one in which the loader of the monitor ran."""
    periodic = "callbacks: [{_target_: runnerkit.dl.PeriodicLoaderCallback, monitor: valid/loss, valid: 2}]"
    Path("config.yaml").write_text(f"{CONFIG}{periodic}\n")

    assert main(["tune", "config.yaml", "--trials", "1", "--engine", "cpu", "optimizer.lr=0.1,0.2"]) == 0

    assert capsys.readouterr().out.splitlines()[0] == f"best: {best_loss('logs/config-tune/trial-000'):.6g}"


def test_a_loader_that_never_runs_cannot_select_a_trial(folder, capsys):
    periodic = "callbacks: [{_target_: runnerkit.dl.PeriodicLoaderCallback, monitor: train/loss, valid: 0}]"
    Path("config.yaml").write_text(f"{CONFIG}{periodic}\n")

    assert main(["tune", "config.yaml", "--trials", "1", "--engine", "cpu", "optimizer.lr=0.1,0.2"]) != 0

    assert "valid/loss" in capsys.readouterr().err


def test_an_epoch_without_a_value_is_left_out(folder, capsys):
    """A metric that is NaN in the first epoch has its best value in a later one; without any, no trial is the best."""
    callbacks = "callbacks=[{_target_: tests.test_search.UndefinedLoss, epochs: %s}]"
    words = ["--trials", "2", "--engine", "cpu", "optimizer.lr=0.1,0.2", "num_epochs=2"]

    assert main(["tune", "config.yaml", *words, callbacks % [1]]) == 0
    assert main(["tune", "config.yaml", *words, callbacks % [1, 2], "--logdir", "none"]) == 2

    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "best: 0.5"
    assert err == "runnerkit tune: valid/loss is NaN in every epoch of every trial: no trial is the best\n"
