"""Tests of what runs record without being asked, and of the hyperparameters in tables of several runs."""

import json
from functools import partial

import pandas as pd
import pytest
import torch
import yaml

from runnerkit import compare_runs, dl, read_metrics
from runnerkit.commands.cli import main
from runnerkit.commands.metrics_text import metrics_text
from runnerkit.warmup import WarmupLR
from tests.runs import log_run
from tests.tiny import loader, mlp, train

CURVES = {"train": {"loss": [2.0, 1.0]}, "valid": {"loss": [3.0, 2.0]}}


def settings_of(logdir):
    return json.loads((logdir / "environment.json").read_text())["settings"]


def describe(logdir, *, hparams=None, environment=None):
    """Write the two files of a run."""
    log_run(logdir, CURVES)
    if hparams is not None:
        (logdir / "hparams.yml").write_text(yaml.safe_dump(hparams, sort_keys=False))
    if environment is not None:
        (logdir / "environment.json").write_text(json.dumps(environment))


def test_optimizer_batch_sizes_and_limits_are_recorded(tmp_path):
    """Without hparams, environment.json has the class and its options, as torch has them, sizes and limits."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    loaders = {"train": loader(16, 4), "valid": loader(12, 6)}
    stop = dl.EarlyStoppingCallback(3, monitor="valid/loss", mode="min")

    train(model, optimizer=optimizer, loaders=loaders, callbacks=[stop], num_epochs=2, num_steps=6,
          accumulation_steps=2, gradient_clip=1.0, logdir=tmp_path)  # fmt: skip

    recorded = settings_of(tmp_path)
    of_optimizer = recorded.pop("optimizer")
    assert of_optimizer.pop("name") == "AdamW"
    expected = {name: [*each] if isinstance(each, tuple) else each for name, each in optimizer.defaults.items()}
    assert of_optimizer.items() <= expected.items() and of_optimizer.keys() >= {"lr", "betas", "weight_decay", "eps"}
    assert recorded == {
        "batch_size": {"train": 4, "valid": 6}, "num_epochs": 2, "num_steps": 6, "accumulation_steps": 2,
        "gradient_clip": 1.0, "monitored": ["valid/loss"],
    }  # fmt: skip
    assert yaml.safe_load((tmp_path / "hparams.yml").read_text()) == {}


def test_groups_with_rates_of_their_own_are_told_apart(tmp_path):
    """An option in which groups differ is a list with the value of each."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}]

    train(model, optimizer=torch.optim.SGD(groups, lr=0.5, momentum=0.9), logdir=tmp_path)

    assert settings_of(tmp_path)["optimizer"]["lr"] == [0.1, 0.5]
    assert settings_of(tmp_path)["optimizer"]["momentum"] == 0.9


def test_options_that_are_tensors_are_recorded_as_numbers(tmp_path):
    """A learning rate that torch.compile does not fix is a tensor; a string could not be compared with numbers."""
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "scales": torch.tensor([1.0, 2.0])},
        {"params": model[3].parameters(), "scales": torch.tensor([1.0, 4.0])},
    ]

    class Scaled(torch.optim.SGD):
        def __init__(self, params, lr, scales=None):
            super().__init__(params, lr=lr)
            for group in self.param_groups:
                group.setdefault("scales", scales)
            self.defaults["scales"] = scales

    train(model, optimizer=Scaled(groups, lr=torch.tensor(0.25)), logdir=tmp_path)

    recorded = settings_of(tmp_path)["optimizer"]
    assert (recorded["lr"], recorded["scales"]) == (0.25, [[1.0, 2.0], [1.0, 4.0]])


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(WarmupLR, num_epochs=2),
        partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1),
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=4),
        partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.1),
    ],
    ids=lambda each: each.func.__name__,
)
def test_a_resumed_run_records_what_the_first_one_did(tmp_path, scheduler):
    """The rate is the one before the schedule, which has changed that of the groups."""

    def fit(num_epochs):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
        train(model, optimizer=optimizer, scheduler=scheduler(optimizer), num_epochs=num_epochs, logdir=tmp_path,
              loaders={"train": loader(4, 4)}, resume="auto")  # fmt: skip
        recorded = settings_of(tmp_path)
        recorded.pop("num_epochs")
        return recorded

    first = fit(2)

    assert first == fit(4)
    assert first["scheduler"] == scheduler.func.__name__
    if scheduler.func is not torch.optim.lr_scheduler.OneCycleLR:  # its own first rate
        assert first["optimizer"]["lr"] == 0.4


def test_several_optimizers_have_a_key_each_and_precision_is_named(tmp_path):
    """The dtype of mixed precision is recorded too."""
    train(precision="bf16", logdir=tmp_path)

    assert settings_of(tmp_path)["precision"] == "bfloat16"


def test_the_table_of_a_sweep_has_what_differs(tmp_path):
    """Each row has its run's values; what is equal, or what a hyperparameter tells already, is left out."""
    for lr, size in ((0.1, 4), (0.01, 8)):
        model = mlp()
        train(model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), loaders={"train": loader(16, size)},
              hparams={"lr": lr, "width": 16}, logdir=tmp_path / f"lr={lr}")  # fmt: skip

    table = read_metrics(tmp_path)

    assert list(table.columns[7:]) == ["lr", "batch_size.train"]
    for row in table.to_dict("records"):
        assert row["run"] == f"lr={row['lr']}"
    assert set(zip(table["lr"], table["batch_size.train"], strict=True)) == {(0.1, 4), (0.01, 8)}
    assert "lr" not in read_metrics(tmp_path / "lr=0.1").columns
    rows = compare_runs(tmp_path)
    assert {row["run"]: row["lr"] for row in rows.to_dict("records")} == {"lr=0.1": 0.1, "lr=0.01": 0.01}
    text = metrics_text(tmp_path).splitlines()
    assert text[2].split()[:3] == ["run", "lr", "batch_size.train"]
    assert "lr,batch_size.train" in metrics_text(tmp_path, as_csv=True)


def test_a_hyperparameter_of_some_runs_differs(tmp_path):
    """A missing one is empty; nested ones have dotted names; lists are strings; 1 and 1.0 are equal."""
    describe(tmp_path / "a", hparams={"model": {"layers": [1, 2]}, "same": 1, "only": "x", "epoch": 1})
    describe(tmp_path / "b", hparams={"model": {"layers": [1, 3]}, "same": 1.0, "epoch": 2})

    table = read_metrics(tmp_path).groupby("run").first()

    assert list(table.columns[6:]) == ["model.layers", "only", "hparams.epoch"]
    assert list(table["model.layers"]) == ["[1, 2]", "[1, 3]"]
    assert table["only"]["a"] == "x" and pd.isna(table["only"]["b"])


@pytest.mark.parametrize("values", [(64, 32), (2**60, 2**60 + 1), (1, 2**64 - 1)])
def test_integers_stay_integers_beside_a_run_without_them(tmp_path, capsys, values):
    """A float would lose digits of a seed, and is not accepted where an integer is expected."""
    for name, value in zip("ab", values, strict=True):
        describe(tmp_path / "two" / name, hparams={"width": value})
        describe(tmp_path / "three" / name, hparams={"width": value})
    describe(tmp_path / "three" / "c", hparams={"width": None})

    assert tuple(compare_runs(tmp_path / "two").sort_values("run")["width"]) == values
    assert main(["metrics", str(tmp_path / "three"), "--json"]) == 0
    found = {row["run"]: row["width"] for row in json.loads(capsys.readouterr().out)["runs"]}
    assert found == {"a": values[0], "b": values[1], "c": None}
    assert all(type(found[name]) is int for name in "ab")


def test_runs_of_earlier_versions_are_compared_by_what_they_recorded(tmp_path):
    """A run without settings beside one with them, and a damaged file, which is named once."""
    engine = {"name": "CPUEngine", "num_processes": 1}
    describe(tmp_path / "old", environment={"engine": engine, "seed": 1, "versions": {"torch": "1"}})
    describe(tmp_path / "new", environment={"engine": {**engine, "num_processes": 2}, "seed": 1,
                                            "settings": {"num_epochs": 2}, "versions": {"torch": "2"}})  # fmt: skip
    describe(tmp_path / "none")

    table = read_metrics(tmp_path)

    assert list(table.columns[7:]) == ["engine.num_processes"]


def test_a_damaged_file_does_not_hide_the_numbers(tmp_path, caplog):
    """The runs are compared without it, with a warning that names it."""
    describe(tmp_path / "a", hparams={"lr": 1})
    describe(tmp_path / "b")
    (tmp_path / "b" / "hparams.yml").write_text("lr: [0.1")

    assert list(read_metrics(tmp_path).columns[7:]) == ["lr"]
    assert "b/hparams.yml cannot be read" in caplog.text


def test_credentials_of_earlier_versions_are_hidden(tmp_path):
    """hparams.yml of an old run may hold one; equal or not, no table shows it."""
    for name in "ab":
        describe(tmp_path / name, hparams={"api_key": f"secret-{name}", "lr": name})

    table = read_metrics(tmp_path)

    assert list(table.columns[7:]) == ["lr"]


def test_recorded_settings_hold_no_credentials(tmp_path):
    """An option of a custom optimizer may be one."""

    class Mine(torch.optim.SGD):
        def __init__(self, params, lr, api_key):
            super().__init__(params, lr=lr)
            self.defaults["api_key"] = api_key
            for group in self.param_groups:
                group["api_key"] = api_key

    model = mlp()
    train(model, optimizer=Mine(model.parameters(), 0.1, "abc-secret"), logdir=tmp_path)

    assert settings_of(tmp_path)["optimizer"]["api_key"] == "***"
