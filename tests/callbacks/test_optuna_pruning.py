"""A trial gets the metric of each epoch, and ends when its study prunes it."""

import math
from types import SimpleNamespace

import optuna
import pytest

from runnerkit import dl
from tests.tiny import loader, mlp, sgd, train


@pytest.fixture
def study():
    """Return a study that prunes trials no better than chance, a loss of about log(3), after any epoch."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="minimize", pruner=optuna.pruners.ThresholdPruner(upper=1.0))


def run(trial, *, lr=0.1, **options):
    model = mlp()
    loaders = {"train": loader(64, 8), "valid": loader(32, 8, seed=1)}
    callbacks = [dl.OptunaPruningCallback(trial, monitor="valid/loss", mode="min")]
    options = {"callbacks": callbacks, "num_epochs": 4, **options}
    return train(model, optimizer=sgd(model, lr=lr), loaders=loaders, **options)


def test_the_trial_has_the_metric_of_each_epoch():
    """The trial's values are those that the runner logs."""
    study = optuna.create_study(direction="minimize", pruner=optuna.pruners.NopPruner())
    trial = study.ask()

    runner = run(trial)

    logged = {epoch: metrics["valid"]["loss"] for epoch, metrics in runner.experiment_metrics.items()}
    assert study.trials[0].intermediate_values == logged and len(logged) == 4


def test_a_bad_trial_ends_after_its_first_epoch(study):
    """With the same objective, a good trial runs to the end, and Optuna knows which one was pruned."""

    def objective(trial):
        lr = trial.suggest_float("lr", 1e-9, 1.0)
        return run(trial, lr=lr).epoch_metrics["valid"]["loss"]

    study.enqueue_trial({"lr": 1e-9})
    study.enqueue_trial({"lr": 0.3})
    study.optimize(objective, n_trials=2)

    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]
    assert [len(trial.intermediate_values) for trial in study.trials] == [1, 4]


def test_a_trial_without_a_study_has_the_smallest_loss():
    """The objective of a FixedTrial returns the best epoch, too."""
    trial = optuna.trial.FixedTrial({})

    runner = run(trial, callbacks=[dl.OptunaPruningCallback(trial, monitor="valid/loss")])

    assert trial.best_score == min(each["valid"]["loss"] for each in runner.experiment_metrics.values())
    assert len({each["valid"]["loss"] for each in runner.experiment_metrics.values()}) == 4


def test_an_epoch_without_a_value_is_left_out_of_the_best():
    """A loss that is NaN in the first epoch has its best value in a later one."""
    trial = optuna.trial.FixedTrial({})
    monitor = dl.OptunaPruningCallback(trial, monitor="valid/loss")

    for epoch, loss in enumerate([math.nan, 0.5, math.nan, 0.7], start=1):
        monitor.on_epoch_end(SimpleNamespace(epoch_step=epoch, epoch_metrics={"valid": {"loss": loss}}))

    assert trial.best_score == 0.5


def test_what_a_study_cannot_hear_or_would_misunderstand_is_refused(study):
    """The error is raised before training."""
    with pytest.raises(ValueError, match="mode='max', but the study's direction is 'minimize'"):
        dl.OptunaPruningCallback(study.ask(), monitor="valid/loss", mode="max")
    with pytest.raises(ValueError, match="reads loader 'vaild'"):
        run(study.ask(), callbacks=[dl.OptunaPruningCallback(study.ask(), monitor="vaild/loss")])


def test_several_processes_are_refused():
    """An in-memory trial would be copied to each process, and its study would get no values."""
    trial = optuna.trial.FixedTrial({})

    with pytest.raises(ValueError, match="DistributedDataParallelEngine has 2 processes: use an engine of one"):
        run(trial, num_processes=2)
