"""Tests of `runnerkit run CONFIG.yaml`: training, written files and the errors of invalid configs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from runnerkit import dl, read_metrics
from runnerkit.__main__ import main as run_command
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.commands.cli import main
from runnerkit.commands.config import read_config
from runnerkit.commands.configured_run import make_run, save_config
from runnerkit.seeding.generators import set_global_seed
from tests.fashion_mnist_layout import write_fashion_mnist
from tests.test_one_run_a_logdir import Holder
from tests.tiny import NUM_CLASSES, NUM_FEATURES, loader, train_by_hand, weights

ROOT = Path(__file__).parents[1]
OURS = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True, "check": False}
CONFIG = """
hparams: {lr: 0.1, width: 16}
model:
  _target_: torch.nn.Sequential
  _args_:
    - {_target_: torch.nn.Linear, in_features: 6, out_features: "${hparams.width}"}
    - {_target_: torch.nn.ReLU}
    - {_target_: torch.nn.Dropout, p: 0.2}
    - {_target_: torch.nn.Linear, in_features: "${hparams.width}", out_features: 3}
criterion: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: "${hparams.lr}", momentum: 0.9}
scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}
loaders:
  train: {_target_: tests.tiny.loader, num_samples: 48, batch_size: 8, shuffle: true}
  valid:
    _target_: torch.utils.data.DataLoader
    dataset: {_target_: tests.tiny.classification, num_samples: 20}
    batch_size: 5
callbacks:
  - {_target_: runnerkit.dl.AccuracyCallback, input_key: logits, target_key: targets}
loggers: {console: null}
num_epochs: 2
monitor: valid/accuracy
mode: max
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the current folder, which contains config.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    return tmp_path


def trained(logdir):
    """Return the state dict of a run's last checkpoint."""
    return load_checkpoint(Path(logdir, "checkpoints", "last.pth"))["model_state_dict"]


def assert_same_bits(one, other):
    assert one.keys() == other.keys() and len(one) > 0
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_config_trains_what_the_loop_by_hand_does(folder):
    """Without shuffling and dropout, a config gives the weights of the hand-written loop, bit for bit."""
    overrides = ["loaders.train.shuffle=false", "model._args_.2.p=0", "scheduler=null", "seed=7"]
    set_global_seed(7)
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Dropout(0), nn.Linear(16, NUM_CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    runner, arguments = make_run(read_config(Path("config.yaml"), overrides))
    runner.train(**arguments)
    train_by_hand(model, optimizer, loader(48, 8), num_epochs=2)

    assert torch.equal(weights(runner.model), weights(model))


@pytest.mark.parametrize("engine", [["--engine", "cpu"], ["--engine", "dp", "--precision", "bf16"]])
def test_the_saved_config_gives_the_same_bits(folder, capsys, engine):
    """The saved config includes overrides and options and reproduces the run bit for bit, in another logdir."""
    assert main(["run", "config.yaml", *engine, "hparams.lr=0.05", "num_epochs=3"]) == 0
    assert main(["run", "logs/config/config.yml"]) == 0

    assert capsys.readouterr().out.split() == ["logs/config", "logs/config-2"]
    assert_same_bits(trained("logs/config"), trained("logs/config-2"))
    saved = [yaml.safe_load(Path(f"logs/{name}/config.yml").read_text()) for name in ("config", "config-2")]
    assert saved[0] == saved[1]
    assert saved[0]["optimizer"]["lr"] == 0.05 and saved[0]["seed"] == 42 and saved[0]["engine"] == engine[1]
    learned = read_metrics("logs/config")
    assert set(learned["epoch"]) == {1, 2, 3}


def test_a_run_goes_on_with_resume(folder):
    """A resumed run has the weights of an uninterrupted run, bit for bit; one with another seed has others."""
    assert main(["run", "config.yaml", "--logdir", "whole"]) == 0
    assert main(["run", "config.yaml", "--logdir", "parts", "num_epochs=1"]) == 0

    assert main(["run", "config.yaml", "--logdir", "parts", "--resume"]) == 0

    assert_same_bits(trained("whole"), trained("parts"))
    assert main(["run", "config.yaml", "--logdir", "other", "seed=1"]) == 0
    one, other = trained("whole"), trained("other")
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_several_models_have_an_optimizer_each(folder):
    """Models, optimizers and schedulers are matched by key; the runner and the engine are components too."""
    overrides = [
        "model={a: {_target_: torch.nn.Linear, in_features: 6, out_features: 3}, b: {_target_: torch.nn.ReLU}, "
        "c: {_target_: torch.nn.Linear, in_features: 3, out_features: 3}}",
        "optimizer={c: {_target_: torch.optim.SGD, lr: 0.1}, a: {_target_: torch.optim.Adam}}",
        "scheduler={c: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}}",
        "runner={_target_: runnerkit.dl.SupervisedRunner, output_key: scores}",
        "engine={_target_: runnerkit.dl.DistributedDataParallelEngine, num_processes: 3, timeout_s: 5}",
    ]

    runner, arguments = make_run(read_config(Path("config.yaml"), overrides))

    types = {key: type(each) for key, each in arguments["optimizer"].items()}
    assert runner.output_key == "scores" and types == {"c": torch.optim.SGD, "a": torch.optim.Adam}
    assert arguments["optimizer"]["a"].param_groups[0]["params"][0] is arguments["model"]["a"].weight
    assert arguments["scheduler"]["c"].optimizer is arguments["optimizer"]["c"]
    assert isinstance(arguments["engine"], dl.DistributedDataParallelEngine)
    assert (arguments["engine"].num_processes, arguments["engine"].timeout_s) == (3, 5)


@pytest.mark.slow
def test_the_example_trains_and_its_config_gives_the_same_bits(folder):
    """The example learns on few images and two processes; a random guess has an accuracy of about 0.1."""
    write_fashion_mnist("small", num_train=600, num_test=200)
    example = str(ROOT / "examples" / "configs" / "fashion_mnist.yaml")
    overrides = ["hparams.data_root=small", "hparams.batch_size=16", "num_epochs=2"]

    assert main(["run", example, "--engine", "ddp", "--nproc", "2", *overrides]) == 0
    assert main(["run", "logs/fashion_mnist/config.yml"]) == 0

    assert_same_bits(trained("logs/fashion_mnist"), trained("logs/fashion_mnist-2"))
    metrics = read_metrics("logs/fashion_mnist")
    assert metrics[(metrics["loader"] == "valid") & (metrics["metric"] == "accuracy")]["value"].iloc[-1] > 0.5
    environment = json.loads(Path("logs/fashion_mnist/environment.json").read_text())
    assert environment["engine"]["num_processes"] == 2


def test_a_script_trains_on_the_engine_of_the_command_line(folder):
    """A script uses the engine of the command line and its own arguments; the command returns its exit code."""
    Path("train.py").write_text(
        "import sys\n"
        "from runnerkit import dl\n"
        "from tests.tiny import train\n"
        "runner = train(engine=dl.CPUEngine())\n"
        "print(type(runner.engine).__name__, type(runner.engine.precision).__name__, sys.argv)\n"
        "sys.exit(7)\n"
    )
    options = ["--engine", "dp", "--precision", "amp", "--", "--lr", "1"]
    command = [sys.executable, "-m", "runnerkit", "run", "train.py", *options]

    done = subprocess.run(command, capture_output=True, **OURS)

    assert done.returncode == 7, done.stderr
    assert done.stdout == "DataParallelEngine AMP ['train.py', '--lr', '1']\n"


def test_components_are_found_in_the_current_folder(folder, monkeypatch):
    """Components are imported from the current folder even if it is not in sys.path, as for the installed command."""
    Path("found_here.py").write_text("from tests.tiny import mlp\n\n\ndef model() -> object:\n    return mlp()\n")
    words = ["run", "config.yaml", "model={_target_: found_here.model}", "num_epochs=1"]
    monkeypatch.setattr(sys, "argv", ["runnerkit", *words])
    monkeypatch.setattr(sys, "path", [str(ROOT), *(each for each in sys.path if each)])
    monkeypatch.setitem(sys.modules, "found_here", None)  # so that it is forgotten afterwards
    monkeypatch.delitem(sys.modules, "found_here")

    assert run_command() == 0


def test_components_are_made_in_the_documented_order(folder, capsys):
    """Constructors may draw random numbers: a set's order would differ from process to process."""
    parts = ["loaders", "callbacks", "loggers"]

    make_run(
        read_config(Path("config.yaml"), [f"{part}={{_target_: builtins.print, _args_: [{part}]}}" for part in parts])
    )

    assert capsys.readouterr().out.split() == parts


def test_what_training_raises_keeps_its_traceback(folder, capsys):
    """An error during training is shown with its traceback, with exit code 1."""
    assert main(["run", "config.yaml", "model._args_.3.in_features=5"]) == 1

    error = capsys.readouterr().err
    assert "Traceback" in error and "mat1 and mat2 shapes cannot be multiplied" in error


STOP = "runnerkit.dl.EarlyStoppingCallback, patience: 2, monitor: valid/acuracy, mode: max"
WRONG = {
    "typo in a key": (["num_epoch=3"], "num_epoch: unknown key; expected one of runner, model,"),
    "typo in an argument": (["optimizer.lrate=0.1"], "SGD does not accept 'lrate'; it accepts params, lr, momentum,"),
    "wrong type": (["num_epochs=three"], "num_epochs: expected int | None, got 'three'"),
    "wrong type of an argument": (["loaders.valid.batch_size=many"], "batch_size: expected int | None, got 'many'"),
    "value out of range": (["model._args_.2.p=2"], "model._args_.2: torch.nn.Dropout: ValueError: dropout probability"),
    "value of a callback in a list": (
        ["callbacks.0={_target_: runnerkit.dl.EarlyStoppingCallback, patience: 0, monitor: valid/loss}"],
        "callbacks.0: runnerkit.dl.EarlyStoppingCallback: ValueError: EarlyStoppingCallback: patience must be",
    ),
    "missing argument": (["model._args_.0={_target_: torch.nn.Linear, in_features: 6}"], "accepts in_features, out_fe"),
    "unknown import path": (["criterion._target_=torch.nn.Entropy"], "criterion._target_: cannot import 'torch.nn.Ent"),
    "last of two": (
        ["model._args_.2.p=2", "callbacks.0.topc=[1]"],
        "not accept 'topc'; it accepts input_key, target_k",
    ),
    "no model": (["model="], "model: is missing"),
    "no loaders": (["loaders=null"], "loaders: is missing"),
    "no component": (["model=3"], "model: expected _target_ and its arguments, got 3"),
    "typo in _target_": (
        ["model={target: torch.nn.Linear, in_features: 6}"],
        "model: _target_, its import path, is mis",
    ),
    "an optimizer without _target_": (["optimizer={lr: 0.1}"], "optimizer: _target_, its import path, is missing; exp"),
    "a loader without _target_": (["loaders.valid={batch_size: 4}"], "loaders.valid: _target_, its import path, is mi"),
    "loaders that are one": (["loaders={batch_size: 4}"], "loaders.batch_size: _target_, its import path, is missing"),
    "a callback without _target_": (["callbacks=[{topk: [1]}]"], "callbacks.0: _target_, its import path, is missing"),
    "a criterion without _target_": (["criterion={reduction: mean}"], "criterion: _target_, its import path, is miss"),
    "a runner without _target_": (["runner={a: {b: 1}}"], "runner: _target_, its import path, is missing"),
    "an engine without _target_": (["engine={num_processes: 1}"], "engine: _target_ is missing; expected a name, or f"),
    "a seed too large": (["seed=20000000000000000000"], "seed: expected a seed from -2**63 to 2**64 - 1"),
    "a seed too small": (["seed=-9999999999999999999"], "seed: expected a seed from -2**63 to 2**64 - 1"),
    "an unknown metric": (["monitor=valid/acuracy"], "metric 'acuracy' of loader 'valid', which has ['accuracy',"),
    "an unknown metric of a callback": (
        [f"callbacks=[{{_target_: {STOP}}}]", "monitor=valid/loss"],
        "reads metric 'acu",
    ),
    "reference to nothing": (["hparams={}"], "Interpolation key 'hparams.width' not found"),
    "no override": (["lr"], "override 'lr' must have the form key=value, such as optimizer.lr=0.01"),
    "override of no place": (["callbacks.5.topk=[1]"], "override 'callbacks.5.topk=[1]': "),
    "unknown loader": (["monitor=vaild/accuracy"], "reads loader 'vaild'; the loaders are ['train', 'valid']"),
    "unknown engine": (["--engine", "dpp"], "engine: unknown engine 'dpp'; expected one of cpu, gpu, dp, ddp, fsdp,"),
    "no engine": (["engine={_target_: torch.nn.ReLU}"], "engine: is a ReLU; expected an engine of dl"),
    "a list of engines": (["engine=[ddp]"], "engine: expected a name, or _target_ and its arguments, got"),
    "unknown precision": (["--precision", "fp4"], "unknown precision 'fp4'; expected one of fp32, amp,"),
    "processes of a lone one": (["--engine", "cpu", "--nproc", "2"], "engine: engine 'cpu' runs in one"),
    "unknown launcher": (["launcher=slurm", "nproc=2"], "engine: unknown launcher 'slurm'; expected 'ray' or"),
    "a launcher without a number": (["--launcher", "ray"], "engine: launcher 'ray' needs the number of processes"),
    "a range without a launcher": (["nproc=[2, 4]"], "engine: the number of processes must be one number without"),
    "a range of three": (["nproc=[2, 3, 4]"], "nproc: expected int | tuple[int, int] | None, got [2, 3, 4]"),
    "a launcher beside a component": (
        ["engine={_target_: runnerkit.dl.CPUEngine}", "--launcher", "ray"],
        "engine: is a component: pass nproc, precision and launcher as its own arguments",
    ),
    "a file for a folder": (["--logdir", "config.yaml/logs"], "config.yml (Not a directory): choose another --logdir"),
    "no permission": (["--logdir", "/proc/logs"], "cannot write /proc/logs/config.yml ("),
    "a run is there": (["--logdir", "old"], "old contains a run: continue it with --resume, or choose another"),
    "a misspelt key in training": (
        ["callbacks.0.input_key=logitz"],
        "reads 'logitz' of a batch of loader 'train', whi",
    ),
    "a misspelt metric in training": (["monitor=train/acuracy"], "metric 'acuracy' of loader 'tr"),
}
OF_THE_COMMAND = ("no override", "a file for a folder", "no permission", "a run is there")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_is_one_line(folder, capsys, caplog, name):
    """An invalid config or option gives one line and exit code 2, and no run is written."""
    arguments, words = WRONG[name]
    Path("old", "csv").mkdir(parents=True)

    assert main(["run", "config.yaml", *arguments]) == 2

    error = capsys.readouterr().err
    assert words in error and error.startswith(f"runnerkit run: {'' if name in OF_THE_COMMAND else 'config.yaml: '}")
    assert len(error.splitlines()) == 1
    if "in training" not in name:
        assert not caplog.records  # outside of pytest, log records are printed too
        assert [path.name for path in folder.rglob("*") if path.name in ("csv", "checkpoints")] == ["csv"]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("horovod", "HorovodEngine needs Horovod: see docs/horovod.md for the install command"),
        ("APEXEngine", "APEXEngine needs NVIDIA Apex, and no package `apex` is installed"),
        ("gpu", "engine 'gpu' needs a GPU and torch sees none; use 'cpu'"),
        (
            "DistributedDataParallelAPEXEngine",
            "DistributedDataParallelAMPEngine (amp=True), torch's own mixed precision",
        ),
        ("{_target_: runnerkit.dl.GPUEngine}", "needs a GPU and torch sees none; use CPUEngine() or cpu=True"),
    ],
)
def test_an_engine_that_this_machine_cannot_have_is_one_line(folder, capsys, monkeypatch, engine, words):
    """An unavailable engine gives one line before any component is created, for configs and scripts."""
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setattr("runnerkit.engines.adapters.apex_package.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("train.py").touch()
    files = ["config.yaml"] if engine.startswith("{") else ["config.yaml", "train.py"]

    for file in files:
        assert main(["run", file, *([f"engine={engine}"] if engine.startswith("{") else ["--engine", engine])]) == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("runnerkit run: ") and len(error.splitlines()) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "train.py"]


def test_the_config_of_a_run_that_lives_is_left_alone(folder, capsys):
    """Resuming a running run is refused and its config is kept; without --resume, a new logdir is used."""
    other = Holder(Path("logs/config"))
    Path("logs/config/config.yml").write_text("mine")

    codes = [main(["run", "config.yaml", *words]) for words in (["--resume"], ["--resume", "--logdir", "logs/config"])]
    refused = capsys.readouterr().err.splitlines()
    beside = main(["run", "config.yaml", "num_epochs=1"])
    with pytest.raises(FileExistsError, match="another run is writing to logs/config: process "):
        save_config(read_config(Path("config.yaml")), Path("logs/config/config.yml"))  # a race
    other.kill()

    assert (codes, beside) == ([2, 2], 0)
    assert ["another run is writing to logs/config: process " in line for line in refused] == [True, True]
    assert capsys.readouterr().out == "logs/config-2\n" and Path("logs/config/config.yml").read_text() == "mine"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("nowhere.yaml", None, ": no such file"),
        ("nowhere.py", None, ": no such file"),
        (".", None, ": a folder: pass a file in it"),
        ("broken.yaml", "model: [1,\nb: 2", " is not valid YAML: "),
        ("list.yaml", "- model\n- loaders", " contains a list; expected a mapping"),
        ("text.yaml", "train, please", ": train, please: unknown key; expected one"),
        ("empty.yaml", "", ": model: is missing"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(folder, capsys, file, text, words):
    """A missing or invalid config file gives one line and exit code 2."""
    if text is not None:
        Path(file).write_text(text)

    assert main(["run", file]) == 2

    error = capsys.readouterr().err
    assert f"{file}{words}" in error and len(error.splitlines()) == 1


def test_processes_of_a_launcher_are_told_to_share_a_folder(folder, capsys, monkeypatch):
    """Under a launcher, --logdir is required, because the processes cannot agree on an unused name."""
    for variable in ("RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=29500"):
        monkeypatch.setenv(*variable.split("="))

    assert main(["run", "config.yaml"]) == 2
    assert "started several processes: pass --logdir, which they share" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_starts_the_command(folder):
    """Under torchrun each process reads the config and one of them writes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "runnerkit", "run", "config.yaml", "--engine", "ddp", "--logdir", "two"]

    done = subprocess.run(command, capture_output=True, **OURS)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "two\n" and Path("two", "config.yml").is_file()
    assert json.loads(Path("two", "environment.json").read_text())["engine"]["num_processes"] == 2
