"""Tests that wrong uses raise before training, with the name of the argument and what to write.

RUNNERKIT_WRITE_WRONG_USES=1 writes the tables of docs/wrong_uses.md.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.commands.cli import main
from tests import wrong_uses_page
from tests.interrupt import at
from tests.tiny import classification, loader, mlp, train

LOADERS = {"train": loader(16, 4), "valid": loader(8, 4)}
FRAME = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
ROWS = torch.zeros(8, 6)


@dataclasses.dataclass
class Hparams:
    lr: float = 0.1
    api_key: str = "secret"


@dataclasses.dataclass
class Made:
    """A value that is made for its test."""

    make: Callable[[], Any]


def refused(error, *words, **arguments):
    """Return an entry of the table: arguments of `train`, the type of the error, and words of its message."""
    return arguments, error, words


def of(**keys):
    return dl.SupervisedRunner(**keys)


BY_KEY = {"train": [{"features": torch.zeros(2, 6), "targets": torch.zeros(2).long()}]}


TRAIN = {
    # Names that are almost right.
    "metric of the monitor misspelt without a logdir": refused(
        KeyError, "monitor='valid/lsos'", "'lsos'", "did you mean 'loss'", monitor="valid/lsos", mode="min"
    ),
    "monitor without its loader": refused(ValueError, "'loader/metric'", "monitor='valid/loss'", monitor="loss"),
    "loader of the monitor misspelt": refused(ValueError, "monitor", "did you mean 'valid'", monitor="vaild/loss"),
    "metric without a mode": refused(
        ValueError, "train: monitor='valid/accuracy'", "mode='max'", monitor="valid/accuracy"
    ),
    "mode misspelt": refused(ValueError, "mode must be 'min'", "did you mean 'max'", monitor="valid/loss", mode="maxx"),
    "mode without a monitor": refused(ValueError, "mode='max'", "monitor='valid/accuracy'", mode="max"),
    "loader of a callback misspelt": refused(
        ValueError, "EarlyStoppingCallback", "did you mean 'valid'",
        callbacks=Made(lambda: [dl.EarlyStoppingCallback(1, monitor="vaild/loss", mode="min")]),
    ),
    "metric of a callback misspelt": refused(
        KeyError, "EarlyStoppingCallback", "did you mean 'loss'",
        callbacks=Made(lambda: [dl.EarlyStoppingCallback(1, monitor="valid/losss", mode="min")]),
    ),
    "training loader misspelt": refused(ValueError, "did you mean 'train'", loaders={"trian": loader(8, 4)}),
    "argument misspelt": refused(TypeError, "train()", "'num_epoch'", "did you mean 'num_epochs'", num_epoch=3),
    "argument of Keras": refused(TypeError, "'epochs'", "did you mean 'num_epochs'", epochs=3),
    "argument of Lightning": refused(TypeError, "did you mean 'gradient_clip'", gradient_clip_val=1.0),
    "argument of Catalyst": refused(TypeError, "did you mean 'monitor'", main_metric="loss"),
    "argument of PyTorch": refused(TypeError, "did you mean 'engine'", device="cuda"),
    "argument of an optimizer": refused(TypeError, "did you mean 'optimizer'", lr=0.1),
    "argument of nobody": refused(TypeError, "train() does not take the argument 'colour'", colour="red"),
    "non_finite misspelt": refused(ValueError, "non_finite", "did you mean 'locate'", non_finite="locat"),
    "loss_reduction misspelt": refused(ValueError, "loss_reduction", "did you mean 'mean'", loss_reduction="means"),
    "resume_options misspelt": refused(
        ValueError, "resume_options", "did you mean 'arguments'", resume_options="argument"
    ),
    "default logger misspelt": refused(
        KeyError, "'tensorbord'", "did you mean 'tensorboard'", loggers={"tensorbord": None}
    ),
    "input misspelt": refused(
        KeyError, "input_key", "did you mean 'features'", loaders=BY_KEY, runner=Made(lambda: of(input_key="feature"))
    ),
    "target misspelt": refused(
        KeyError, "did you mean 'targets'", loaders=BY_KEY, runner=Made(lambda: of(target_key="target"))
    ),
    # Components.
    "criterion by name": refused(TypeError, "criterion is 'mse'", "criterion=torch.nn.MSELoss()", criterion="mse"),
    "criterion by a longer name": refused(TypeError, "torch.nn.CrossEntropyLoss()", criterion="cross_entropy"),
    "criterion by a name of nobody": refused(TypeError, "torch.nn.CrossEntropyLoss()", criterion="ce"),
    "one criterion of two by name": refused(TypeError, "criterion['b']", criterion={"a": nn.MSELoss(), "b": "mse"}),
    "criteria in a list": refused(TypeError, "criterion is a list", "dict", criterion=[nn.MSELoss()]),
    "criterion is a number": refused(TypeError, "criterion is 0.5, not a loss", criterion=0.5),
    "optimizer by name": refused(
        TypeError, "optimizer is 'adam'", "torch.optim.Adam(model.parameters(), lr=", optimizer="adam"
    ),
    "optimizer by a misspelt name": refused(TypeError, "torch.optim.AdamW(model.", optimizer="adam_w"),
    "optimizer is a learning rate": refused(TypeError, "optimizer is 0.1", "model.parameters()", optimizer=0.1),
    "optimizer is the parameters": refused(
        TypeError, "optimizer is a generator", optimizer=Made(lambda: mlp().parameters())
    ),
    "optimizer is the model": refused(TypeError, "optimizer is a Sequential", optimizer=mlp()),
    "optimizer is a scheduler": refused(
        TypeError, "optimizer is a StepLR, not an optimizer",
        optimizer=Made(lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(mlp().parameters(), lr=0.1), 2)),
    ),
    "scheduler is an optimizer": refused(
        TypeError, "scheduler is a SGD, not a scheduler", "StepLR(optimizer, 10)",
        scheduler=Made(lambda: torch.optim.SGD(mlp().parameters(), lr=0.1)),
    ),
    "scheduler is the model": refused(TypeError, "scheduler is a Sequential, not a scheduler", scheduler=mlp()),
    "optimizers in a list": refused(TypeError, "optimizer is a list", "dict", optimizer=[1]),
    "no optimizer in a dict": refused(TypeError, "optimizer is an empty dict", "leave it out", optimizer={}),
    "no loss in a dict": refused(TypeError, "criterion is an empty dict", "by name", criterion={}),
    "model by name": refused(TypeError, "model is 'resnet18'", "nn.Module", model="resnet18", optimizer=None),
    "model is a class": refused(TypeError, "model is the class Linear", "Linear(...)", model=nn.Linear, optimizer=None),
    "model is a function": refused(TypeError, "model is a function", "nn.Module", model=lambda: mlp, optimizer=None),
    # Callbacks and loggers.
    "callbacks is a class": refused(
        TypeError, "callbacks", "the class TimerCallback", "callbacks=[TimerCallback(...)]", callbacks=dl.TimerCallback
    ),
    "callbacks is one callback": refused(
        TypeError, "callbacks", "list", "TimerCallback", callbacks=Made(lambda: dl.TimerCallback())
    ),
    "callbacks has a class": refused(
        TypeError, "callbacks has the class TimerCallback", "TimerCallback(...)", callbacks=[dl.TimerCallback]
    ),
    "callbacks by name": refused(TypeError, "callbacks must be a list or a dict", callbacks="accuracy"),
    "callbacks is a number": refused(TypeError, "callbacks must be a list or a dict", callbacks=3),
    "callbacks has a dict": refused(TypeError, "expected a runnerkit Callback", callbacks=[{"a": dl.TimerCallback}]),
    "loggers in a list": refused(TypeError, "loggers must be a dict", loggers=["tensorboard"]),
    "logger is True": refused(TypeError, "logger 'csv'", "None to disable", loggers={"csv": True}),
    # Loaders.
    "loaders in a tuple": refused(TypeError, "loaders must be a dict", loaders=(loader(8, 4), loader(8, 4))),
    "loader is a frame": refused(TypeError, "loader 'train' is a DataFrame", "DataLoader(", loaders={"train": FRAME}),
    "loader is a tensor": refused(TypeError, "loader 'train' is a Tensor", "DataLoader(", loaders={"train": ROWS}),
    "loader is an array": refused(
        TypeError, "loader 'train' is a ndarray", "DataLoader(", loaders={"train": ROWS.numpy()}
    ),
    "loader is a class": refused(TypeError, "loader 'train' is the class DataLoader", loaders={"train": DataLoader}),
    "loader is a path": refused(TypeError, "loader 'train' is a str", loaders={"train": "data.csv"}),
    "loader has a number": refused(TypeError, "the keys of loaders must be str", "'train'", loaders={0: loader(8, 4)}),
    "monitor is a loader": refused(TypeError, "monitor must be a str", monitor=loader(8, 4)),
    # Values.
    "no seed": refused(TypeError, "seed must be an integer, got None", "randrange", seed=None),
    "seed is a text": refused(TypeError, "seed must be an integer", seed="42"),
    "seed is a float": refused(TypeError, "seed must be an integer", seed=4.2),
    "seed out of range": refused(ValueError, "seed must be from", seed=2**64),
    "hparams of argparse": refused(
        TypeError, "hparams must be a dict", "hparams=vars(...)", hparams=argparse.Namespace(api_key="secret")
    ),
    "hparams of a dataclass": refused(TypeError, "hparams=dataclasses.asdict(...)", hparams=Hparams()),
    "hparams in a list": refused(TypeError, "hparams=dict(...)", hparams=[("lr", 0.1)]),
    "logdir is a number": refused(TypeError, "logdir must be a path or None, got 3", logdir=3),
    "logdir is a flag": refused(TypeError, "logdir must be a path or None, got True", logdir=True),
    "logdir is empty": refused(ValueError, "logdir is empty", "None", logdir=""),
    "load_best_on_end without a logdir": refused(
        ValueError, "load_best_on_end=True", "pass logdir=", load_best_on_end=True, monitor="valid/loss"
    ),
    "max_hours without a logdir": refused(ValueError, "max_hours=1", "pass logdir=", max_hours=1),
    "profile without a logdir": refused(ValueError, "profile=True", "pass logdir=", profile=True),
    "resume without a logdir": refused(ValueError, 'resume="auto"', "pass logdir=", resume="auto"),
    "resume of an empty text": refused(TypeError, "resume=''", "path of a checkpoint", resume=""),
    "resume of a name": refused(FileNotFoundError, "resume='", "last", "logdir", resume="last"),
    "mode is a flag": refused(ValueError, "mode must be 'min'", "got True", monitor="valid/loss", mode=True),
    "verbose is a word": refused(TypeError, "verbose must be True or False, got 'no'", verbose="no"),
    "profile is a path": refused(TypeError, "profile must be True or False", profile="trace.json"),
    "ddp is a number": refused(TypeError, "ddp must be True", "DistributedDataParallelEngine(4)", ddp=4),
    "amp is a dtype": refused(TypeError, "amp must be True", "precision='bf16'", amp="bf16"),
    "amp is a number of bits": refused(TypeError, "amp must be True", "precision='fp16'", amp=16),
    "fp16 is a dtype of torch": refused(TypeError, "fp16 must be True", "precision='fp16'", fp16=torch.float16),
    "apex is a word": refused(TypeError, "apex must be True or False", apex="yes"),
    "precision of Lightning": refused(ValueError, "precision must be", "did you mean 'bf16'", precision="bf16-mixed"),
    "precision is a dtype": refused(ValueError, "did you mean 'fp16'", precision=torch.float16),
    "engine is a device": refused(ValueError, "engine 'cuda:0'", "dl.DeviceEngine('cuda:0')", engine="cuda:0"),
    "hang_timeout_s is a text": refused(TypeError, "hang_timeout_s must be a number", hang_timeout_s="60"),
    "num_epochs is a text": refused(TypeError, "num_epochs must be an integer >= 1 or None", num_epochs="3"),
    "gradient_clip is a flag": refused(TypeError, "gradient_clip must be a number", gradient_clip=True),
}  # fmt: skip


def message_of(call, error):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value).__module__.startswith(("builtins", "runnerkit"))
    return str(caught.value)


@pytest.mark.parametrize("name", TRAIN)
def test_a_wrong_argument_of_train_is_named_before_training(tmp_path, monkeypatch, name):
    """The message has the argument and what to write; no batch runs and no file is written."""
    monkeypatch.chdir(tmp_path)
    given, error, words = TRAIN[name]
    given = {key: value.make() if isinstance(value, Made) else value for key, value in given.items()}
    trained = []
    monkeypatch.setattr(dl.SupervisedRunner, "on_step_end", lambda self, runner: trained.append(runner.batch_step))

    message = message_of(lambda: train(**{"loaders": LOADERS, **given}), error)

    assert [word for word in words if word not in message] == [], message
    assert "secret" not in message
    assert trained == [] and list(tmp_path.iterdir()) == []
    wrong_uses_page.check_row("TRAIN", name, error=error, message=message)


def predicted(*args, **kwargs):
    return lambda: list(dl.SupervisedRunner(mlp()).predict_loader(*args, **{"cpu": True, **kwargs}))


def evaluated(*args, **kwargs):
    runner = dl.SupervisedRunner(kwargs.pop("of", None) or mlp())
    return lambda: runner.evaluate_loader(*args, **{"cpu": True, "criterion": nn.CrossEntropyLoss(), **kwargs})


VALID = loader(8, 4)
OTHERS = {
    "predict_loader by position": (predicted(VALID, mlp()), TypeError, "predict_loader(model=...)"),
    "prediction of a frame": (predicted(loader=FRAME), TypeError, "DataFrame; pass a loader of its rows"),
    "prediction of a tensor": (predicted(loader=ROWS), TypeError, "Tensor; pass a loader of its rows"),
    "prediction of a data set": (predicted(loader=classification(8)), TypeError, "a data set: pass DataLoader("),
    "prediction of several loaders": (predicted(loader=LOADERS), TypeError, "pass loaders['train']"),
    "prediction of nothing": (predicted(loader=None), TypeError, "is a NoneType; expected a DataLoader"),
    "prediction without a seed": (predicted(loader=VALID, seed=None), TypeError, "seed must be an integer, got None"),
    "prediction from nowhere": (predicted(loader=VALID, resume="no/such"), FileNotFoundError, "no/such"),
    "prediction with a name": (predicted(loader=VALID, model="resnet18"), TypeError, "model is 'resnet18'"),
    "evaluation of a frame": (evaluated(FRAME), TypeError, "evaluate_loader is a DataFrame; pass a loader"),
    "evaluation of a data set": (evaluated(classification(8)), TypeError, "a data set: pass DataLoader("),
    "evaluation of several loaders": (evaluated(LOADERS), TypeError, "pass loaders['train']"),
    "evaluation by a class": (
        evaluated(VALID, callbacks=[dl.AccuracyCallback]), TypeError, "the class AccuracyCallback",
    ),
    "evaluation by one callback": (
        evaluated(VALID, callbacks=dl.AccuracyCallback()), TypeError, "put it in a list",
    ),
    "evaluation by a name": (evaluated(VALID, criterion="mse"), TypeError, "criterion=torch.nn.MSELoss()"),
    "evaluation without a seed": (evaluated(VALID, seed=None), TypeError, "evaluate_loader: seed must be an integer"),
    "evaluation with a typo": (evaluated(VALID, callback=[]), TypeError, "did you mean 'callbacks'"),
    "evaluation on a name": (evaluated(VALID, engine="cqu", cpu=False), ValueError, "unknown engine 'cqu'"),
    "file of predictions without a name": (
        lambda: dl.SupervisedRunner(mlp()).predict_to(None, loader=VALID, cpu=True), TypeError, "path must be a path",
    ),
    "file of predictions of a form": (
        lambda: dl.SupervisedRunner(mlp()).predict_to("out.xlsx", loader=VALID, cpu=True), ValueError, ".parquet",
    ),
    "train by position": (lambda: dl.SupervisedRunner().train(mlp()), TypeError, "train(loaders=...)"),
    "keys of a runner": (lambda: dl.SupervisedRunner(input_key=3), TypeError, "input_key must be a str"),
    "loss of a runner": (lambda: dl.SupervisedRunner(loss_key=None), TypeError, "loss_key must be a str"),
    "weights of a name": (lambda: dl.SupervisedRunner(mlp()).load("a", which="lats"), ValueError, "'best' or 'last'"),
    "weights of a number": (lambda: dl.SupervisedRunner(mlp()).load(3), TypeError, "source must be a path"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_wrong_use_of_another_method_is_named(tmp_path, monkeypatch, name):
    """Prediction, evaluation, loading and the runners themselves say what to write too."""
    monkeypatch.chdir(tmp_path)
    call, error, words = OTHERS[name]

    message = message_of(call, error)

    assert words in message and list(tmp_path.iterdir()) == []
    wrong_uses_page.check_row("OTHERS", name, error=error, message=message)


@pytest.mark.parametrize("has_logdir", [False, True])
@pytest.mark.parametrize("begins", [1, 2])
def test_a_loss_that_is_nan_says_what_to_do(tmp_path, has_logdir, begins):
    """The message names the two arguments that help, and a checkpoint only if there is one."""

    def spoil(runner):
        if runner.epoch_step == begins and runner.loader_batch_step == 2:
            runner.batch_metrics["loss"] = runner.batch_metrics["loss"] * float("nan")

    logdir = tmp_path / "log" if has_logdir else None
    with pytest.raises(ValueError, match="became nan within epoch") as caught:
        train(callbacks=[at("on_batch_end", spoil, order=30)], num_epochs=3, logdir=logdir)

    message = str(caught.value)
    assert "gradient_clip=1.0" in message and 'non_finite="locate"' in message
    assert ("checkpoint" in message) == (has_logdir and begins == 2)


CONFIG = """
model: {_target_: torch.nn.Linear, in_features: 64, out_features: 10}
criterion: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loaders:
  train: {_target_: torch.utils.data.DataLoader, batch_size: 8, dataset: {_target_: runnerkit.contrib.Digits}}
"""
COMMANDS = {
    "key almost right": (["run", "c.yaml", "num_epoch=3"], "num_epoch: unknown key", "did you mean 'num_epochs'"),
    "key of another library": (["run", "c.yaml", "max_epochs=3"], "unknown key", "did you mean 'num_epochs'"),
    "flag of train": (["run", "c.yaml", "amp=true"], "amp: unknown key", "did you mean 'precision: amp'"),
    "part almost right": (["run", "c.yaml", "optimiser.lr=3"], "did you mean 'optimizer'"),
    "argument almost right": (["run", "c.yaml", "model.in_feature=3"], "does not accept", "did you mean 'in_features'"),
    "class almost right": (
        ["run", "c.yaml", "optimizer._target_=torch.optim.Addam"], "cannot import", "did you mean torch.optim.Adam",
    ),
    "loader almost right": (["run", "c.yaml", "monitor=trian/loss"], "monitor", "did you mean 'train'"),
    "engine almost right": (["run", "c.yaml", "--engine", "ddpp"], "unknown engine", "did you mean 'ddp'"),
    "precision almost right": (["run", "c.yaml", "--precision", "bfloat16"], "precision", "did you mean 'bf16'"),
    "override without a value": (["run", "c.yaml", "num_epochs"], "key=value"),
    "option instead of a key": (["run", "c.yaml", "--num-epochs", "3"], "No such option", "--num-epochs"),
    "config that is not there": (["run", "d.yaml"], "d.yaml: no such file"),
    "command almost right": (["exprot", "log"], "No such command 'exprot'"),
    "export of a script's run": (
        ["export", "log", "--to", "onnx"], "a script trained the run", "utils.onnx_export", "--to safetensors",
    ),
    "export of nothing": (["export", "no/such", "--to", "onnx"], "no such logdir or checkpoint"),
    "metric almost right": (["metrics", "log", "--metric", "losss"], "did you mean 'loss'"),
    "curve almost right": (["plot", "log", "--loader", "trian"], "did you mean 'train'"),
    "report of nothing": (["report", "no/such"], "no/such"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a config, and a run of a script."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "c.yaml").write_text(CONFIG)
    train(logdir=folder / "log", loaders=LOADERS)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_use_of_a_command_is_named(folder, monkeypatch, capsys, name):
    """A sentence without a traceback, with exit code 2; nothing is trained."""
    monkeypatch.chdir(folder)
    arguments, *words = COMMANDS[name]

    code = main(arguments)

    err = " ".join(capsys.readouterr().err.split())
    assert code == 2 and "Traceback" not in err
    assert [word for word in words if word not in err] == [], err
    assert not list(folder.glob("logs/**/*.pth"))
    wrong_uses_page.check_row("COMMANDS", name, message=err)


def test_the_tables_hold_what_newcomers_did():
    """Fifty-seven wrong uses of the API and ten of commands were found with newcomers."""
    assert len(TRAIN) + len(OTHERS) >= 57 and len(COMMANDS) >= 10


@pytest.mark.parametrize("table", ["TRAIN", "OTHERS", "COMMANDS"])
def test_the_page_has_these_wrong_uses_and_no_others(table):
    """Each row of docs/wrong_uses.md belongs to a test above, which compares its message."""
    begins = [row.split(" | ")[0] for row in wrong_uses_page.rows(table)]

    assert begins == [f"| {wrong_uses_page.code(each)}" for each in wrong_uses_page.uses()[table].values()]
    assert len(set(begins)) == len(begins)
    assert COMMANDS.keys() > wrong_uses_page.WORDED_BY_OTHERS


def test_what_resembles_a_wrong_use_still_trains(tmp_path):
    """Flags of 0 and 1, a tuple and a generator of callbacks, NumPy seeds, iterators of one epoch and functions."""

    def square(logits, targets):
        return (logits - nn.functional.one_hot(targets, 3)).square().mean()

    train(verbose=0, check=0, seed=np.int64(3), callbacks=(dl.TimerCallback(),), criterion=square)
    train(callbacks=(each for each in [dl.TimerCallback()]), loaders={"train": iter(loader(8, 4))}, hparams={"lr": 0.1})
    train(monitor="valid/loss", loaders=LOADERS, loggers={"wandb": None, "csv": None})
