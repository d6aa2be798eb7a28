"""`runnerkit tune`: the best of what was tried, and the config that gives it again."""

from functools import partial
from pathlib import Path

import optuna
import pytest
from optuna.pruners import ThresholdPruner

from runnerkit import read_metrics
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
valid_loader: valid
valid_metric: loss
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current one, with config.yaml in it."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    return tmp_path


def best_loss(logdir):
    metrics = read_metrics(logdir)
    return metrics[(metrics["loader"] == "valid") & (metrics["metric"] == "loss")]["value"].min()


def test_the_best_is_found_and_given_again(folder, capsys):
    """Of two learning rates one learns nothing; best.yml gives the best trial's loss to the last digit."""
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
    """As its study says, after its first epoch; its config is no candidate for the best."""
    monkeypatch.setattr(optuna, "create_study", partial(optuna.create_study, pruner=ThresholdPruner(upper=1.0)))

    assert main(["tune", "config.yaml", "--trials", "6", "--engine", "cpu", "optimizer.lr=1e-9,0.3"]) == 0

    epochs = {path.name: read_metrics(path)["epoch"].max() for path in Path("logs/config-tune").glob("trial-*")}
    rates = {
        name: read_config(Path(f"logs/config-tune/{name}/config.yml")).values["optimizer"]["lr"] for name in epochs
    }
    assert set(rates.values()) == {1e-9, 0.3}
    assert all(epochs[name] == (1 if rate == 1e-9 else 2) for name, rate in rates.items())


def test_what_training_raises_keeps_its_traceback(folder, capsys):
    """Of a trial, too; exit code 1."""
    model = "model={_target_: torch.nn.Linear, in_features: 5, out_features: 3}"

    assert main(["tune", "config.yaml", "--trials", "1", "optimizer.lr=0.1,0.2", model]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_trials_may_have_several_processes(folder, capsys):
    """Which are not given up half-way."""
    assert main(["tune", "config.yaml", "--trials", "1", "--nproc", "2", "optimizer.lr=0.1,0.2"]) == 0
    assert capsys.readouterr().out.startswith(f"best: {best_loss('logs/config-tune/trial-000'):.6g}\n")


def test_ranges_may_stand_in_the_config(folder, capsys):
    """Those of the command line come on top; `run` leaves them alone."""
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
    """Its choices come from the config's seed."""
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
    """Of integers if both ends are."""
    trial = optuna.create_study().ask()

    suggest(trial, "key", text)

    found = trial.distributions["key"]
    assert (type(found).__name__, found.low, found.high, found.log) == (kind, low, high, log)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "config.yaml: search: no ranges; give some there, or as KEY=LOW..HIGH or KEY=THIS,THAT"),
        (["optimizer.lr=1..0"], "optimizer.lr=1..0: expected LOW..HIGH, LOW..HIGH:log, or choices such as 16,32,64"),
        (["optimizer.lr=0..x"], "optimizer.lr=0..x: expected LOW..HIGH"),
        (["optimizer.lr=1e-3..1.0:lin"], "optimizer.lr=1e-3..1.0:lin: expected LOW..HIGH"),
        (["optimizer.lr=0..1:log"], "optimizer.lr=0..1:log: a logarithmic range begins above 0, got 0"),
        (["optimizer.lr=1,2", "valid_metric=null"], "config.yaml: valid_metric: is missing"),
        (
            ["optimizer.lr=1,2", "valid_metric=mae"],
            "minimize_valid_metric: is missing: true or false, whether less mae",
        ),
        (["optimizer.lrr=1,2"], "config.yaml: optimizer: torch.optim.sgd.SGD takes no 'lrr'; it takes params, lr,"),
        (["optimizer.lr=1,2", "--logdir", "old"], "old holds the trials of a search: choose another by --logdir"),
    ],
)
def test_a_search_that_cannot_be_is_one_line(folder, capsys, caplog, arguments, words):
    """With exit code 2; Optuna does not print the traceback of a trial."""
    Path("old", "trial-000").mkdir(parents=True)
    optuna.logging.get_logger("optuna").addHandler(caplog.handler)

    assert main(["tune", "config.yaml", *arguments]) == 2

    optuna.logging.get_logger("optuna").removeHandler(caplog.handler)
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1 and not caplog.records


def test_a_search_makes_at_least_one_trial(folder, capsys):
    """Of none there is no best."""
    assert main(["tune", "config.yaml", "--trials", "0", "optimizer.lr=1,2"]) == 2
    assert "'--trials'" in capsys.readouterr().err
