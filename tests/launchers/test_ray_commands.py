"""`runnerkit run` and `runnerkit tune` on a cluster of two Ray nodes of this machine."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import optuna
import pytest
import torch

from runnerkit import read_metrics
from runnerkit.commands.cli import main
from runnerkit.commands.config import TrainingError, read_config
from runnerkit.commands.ray_trials import prunes, train_here
from runnerkit.storage.logdir_lock import LogdirInUse
from runnerkit.utils import load_checkpoint
from tests.launchers.ray_jobs import Script, needs_ray

CONFIG = """
model: {_target_: tests.tiny.mlp}
criterion: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loaders:
  train: {_target_: tests.tiny.loader, num_samples: 64, batch_size: 8, shuffle: true}
  valid: {_target_: tests.tiny.loader, num_samples: 32, batch_size: 8, seed: 1}
num_epochs: 2
monitor: valid/loss
"""
# A module of the user beside the config.
WAITS = """
import os
import time
from pathlib import Path

from runnerkit import dl


class Waits(dl.Callback):
    def on_epoch_start(self, runner):
        print(f"begins epoch {runner.epoch_step} with pid {os.getpid()}", flush=True)
        while runner.epoch_step == 2 and not Path("go").exists():
            time.sleep(0.05)
"""
PRUNES = """
from functools import partial
import optuna
from optuna.pruners import ThresholdPruner
optuna.create_study = partial(optuna.create_study, pruner=ThresholdPruner(upper=1.0))
"""


def starter(cluster, folder):
    """Return a function that starts the command in a folder with config.yaml; `before` is code that runs before it."""
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "waits.py").write_text(WAITS)

    def start(*words, before=""):
        code = f"{before}\nimport sys\nfrom runnerkit.commands.cli import main\nsys.exit(main({list(words)}))\n"
        (folder / "command.py").write_text(code)
        return Script(cluster, folder, script=folder / "command.py")

    return start


@pytest.fixture
def start(cluster, tmp_path):
    """Return a function that starts the command on the cluster."""
    return starter(cluster, tmp_path)


def losses(logdir):
    """Return the validation losses of a run, by epoch."""
    metrics = read_metrics(logdir)
    return metrics[(metrics["loader"] == "valid") & (metrics["metric"] == "loss")].set_index("epoch")["value"].to_dict()


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_a_config_trains_on_the_cluster(start, cluster, tmp_path):
    """Weights and logs are those of processes of this machine; the JSON comes after all lines of the ranks."""
    words = ["run", "config.yaml", "--nproc", "2", "--json", "--logdir"]
    script = start(*words, "logs/ray", "--launcher", "ray")

    assert script.end() == 0, script.output

    subprocess.run(
        [sys.executable, "-m", "runnerkit", *words, "logs/local"], cwd=tmp_path, env=cluster.environment, check=True
    )
    found, expected = (load_checkpoint(tmp_path / f"logs/{name}/checkpoints/last.pth") for name in ("ray", "local"))
    assert all(torch.equal(each, expected["model_state_dict"][key]) for key, each in found["model_state_dict"].items())
    assert losses(tmp_path / "logs/ray") == losses(tmp_path / "logs/local")
    assert "(rank 0 pid=" in script.output
    assert json.loads(script.output.splitlines()[-1])["metrics"]["valid"]["loss"] == losses(tmp_path / "logs/ray")[2]


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_a_script_trains_on_the_cluster(start, tmp_path):
    """The launcher of the command line replaces the script's engine."""
    (tmp_path / "train.py").write_text("from tests.tiny import train\nprint('trained by', train().engine.bounds)\n")
    script = start("run", "train.py", "--nproc", "2", "--launcher", "ray")

    assert script.end() == 0, script.output

    assert "trained by (2, 2)" in script.output


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_trials_train_at_the_same_time_and_outlive_a_node(own_cluster, tmp_path):
    """Both are in their second epoch when a node is killed; the trial of that node continues from its checkpoint."""
    words = ["tune", "config.yaml", "--trials", "2", "--engine", "cpu", "--launcher", "ray"]
    script = starter(own_cluster, tmp_path)(*words, "optimizer.lr=1e-4..0.3:log", "callbacks=[{_target_: waits.Waits}]")
    script.wait_for(r"(?s)begins epoch 2.*begins epoch 2")
    own_cluster.do("kill")
    own_cluster.do("add 1")
    (tmp_path / "go").touch()

    assert script.end() == 0, script.output

    assert script.output.count("begins epoch 1") == 2
    assert "(trial-000 pid=" in script.output and "(trial-001 pid=" in script.output
    found = [losses(path) for path in sorted((tmp_path / "logs/config-tune").glob("trial-*"))]
    assert [[*each] for each in found] == [[1, 2], [1, 2]]
    assert f"best: {min(value for each in found for value in each.values()):.6g}\n" in script.output


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_a_bad_trial_is_pruned(start, tmp_path):
    """The study's pruner ends a bad trial after its first epoch; best.yml reproduces the best one without a cluster."""
    words = ["tune", "config.yaml", "--trials", "6", "--engine", "cpu", "--launcher", "ray", "--json"]
    script = start(*words, "optimizer.lr=1e-9,0.3", before=PRUNES)

    assert script.end() == 0, script.output

    trials = sorted((tmp_path / "logs/config-tune").glob("trial-*"))
    rates = {path.name: read_config(path / "config.yml").values["optimizer"]["lr"] for path in trials}
    assert len(rates) == 6 and set(rates.values()) == {1e-9, 0.3}
    assert all(len(losses(path)) == (1 if rates[path.name] == 1e-9 else 2) for path in trials)
    best = json.loads(script.output.splitlines()[-1])
    assert best["values"] == {"optimizer.lr": "0.3"}
    assert best["best"] == min(value for path in trials for value in losses(path).values())
    assert "launcher" not in read_config(tmp_path / best["config"]).values


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_a_trial_may_have_several_processes(start, cluster, tmp_path):
    """They are on a node that has as many CPUs."""
    cluster.do("add 2")
    try:
        script = start(
            "tune", "config.yaml", "--trials", "1", "--nproc", "2", "--launcher", "ray", "optimizer.lr=0.1,0.2"
        )
        assert script.end() == 0, script.output
    finally:
        cluster.do("kill")

    [environment] = (tmp_path / "logs/config-tune").glob("trial-000/environment.json")
    assert json.loads(environment.read_text())["engine"]["num_processes"] == 2


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("model={_target_: torch.nn.Linear, in_features: 5, out_features: 3}", 1, "mat1 and mat2 shapes"),
        ("criterion={_target_: torch.nn.NoLoss}", 2, "runnerkit tune: config.yaml: criterion._target_: cannot import"),
    ],
)
def test_what_a_trial_raises_ends_the_search(start, override, code, words):
    """An error in training is shown with its traceback, a wrong config in one line, as without a cluster."""
    script = start("tune", "config.yaml", "--trials", "4", "--launcher", "ray", "optimizer.lr=0.1,0.2", override)

    assert script.end() == code

    assert words in script.output and ("Traceback" in script.output) == (code == 1)


@pytest.mark.parametrize(
    "words", [["run", "config.yaml", "--nproc", "2"], ["tune", "config.yaml", "optimizer.lr=0.1,0.2"]]
)
def test_without_ray_the_commands_name_what_to_install(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    monkeypatch.setitem(sys.modules, "ray", None)

    assert main([*words, "--launcher", "ray"]) == 2

    error = capsys.readouterr().err
    assert "pip install 'runnerkit[ray]'" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("nproc=[2, 4]", "config.yaml: nproc: expected int | None, got [2, 4]"),
        (
            "engine={_target_: runnerkit.dl.DistributedDataParallelEngine, num_processes: 2, "
            "launcher: {_target_: runnerkit.dl.RayLauncher}}",
            "config.yaml: engine.launcher: each trial has one node with --launcher",
        ),
    ],
)
def test_trials_on_several_nodes_are_refused(tmp_path, monkeypatch, capsys, override, words):
    """It is refused before the search looks for a cluster."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)

    assert main(["tune", "config.yaml", "optimizer.lr=0.1,0.2", override, "--launcher", "ray"]) == 2

    assert words in capsys.readouterr().err


def test_a_report_of_a_trial_that_has_ended_is_answered():
    """It comes from an attempt on a node that was taken for lost, which would wait forever otherwise."""
    trial = (study := optuna.create_study()).ask()

    assert not prunes([trial], trial.number, 0.5, 1)
    assert prunes([], trial.number, 0.25, 2)

    assert study.trials[0].intermediate_values == {1: 0.5}


def in_training(cause):
    """Return the error of a trial whose training raised `cause`."""
    error = TrainingError()
    error.__cause__ = cause
    return error


LOCKED = LogdirInUse("another run is writing to trial-000")


def train_failing(folder, monkeypatch, error, *, wait_s=600.0):
    """Train a trial that fails twice; `wait_s` is the time to wait for the lock of its folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("runnerkit.commands.ray_trials._LOCKED_S", wait_s)
    monkeypatch.setattr("runnerkit.commands.ray_trials._PAUSE_S", 0.0)
    monkeypatch.setattr("runnerkit.commands.trial.train_trial", Mock(side_effect=[error, error, 0.5]))
    return train_here(None, 0, None, None, folder, [], str(folder))


@pytest.mark.parametrize("error", [LOCKED, in_training(LOCKED)])
def test_a_trial_waits_for_the_lock_of_a_lost_node(tmp_path, monkeypatch, error):
    """A file system that nodes share releases it after a while; in an object store, training asks for it."""
    assert train_failing(tmp_path, monkeypatch, error) == 0.5


def test_a_trial_does_not_wait_forever_for_a_lock(tmp_path, monkeypatch):
    with pytest.raises(FileExistsError, match="another run is writing to trial-000"):
        train_failing(tmp_path, monkeypatch, LOCKED, wait_s=-1.0)


@pytest.mark.parametrize("error", [FileExistsError("trial-000 is a file"), in_training(FileExistsError("mine"))])
def test_a_file_that_exists_is_not_waited_for(tmp_path, monkeypatch, error):
    with pytest.raises(type(error)):
        train_failing(tmp_path, monkeypatch, error)
