"""Tests that `monitor`, `mode`, `keep_best` and others are the names of arguments, and that the old ones still work."""

import json
import warnings
from functools import partial
from pathlib import Path

import optuna
import pytest
import torch
from packaging.version import Version

from runnerkit import contrib, dl, metrics
from runnerkit.monitor import Monitor
from runnerkit.support.deprecation import REMOVED_IN, accepts_old_names, old_names
from runnerkit.version import __version__
from tests.tiny import loader, mlp, train, weights

WITH_TOPK = (
    dl.AccuracyCallback, dl.CMCScoreCallback, dl.HitrateCallback, dl.MAPCallback, dl.MRRCallback, dl.NDCGCallback,
    metrics.AccuracyMetric, metrics.CMCMetric, metrics.HitrateMetric, metrics.MAPMetric, metrics.MRRMetric,
    metrics.NDCGMetric,
)  # fmt: skip
LABELS = [0, 0, 0, 1, 1, 2]
TRIAL = optuna.trial.FixedTrial({})


def observed(thing):
    """Return what the arguments of a callback, a loss or a sampler have set."""
    if isinstance(thing, torch.utils.data.Sampler):
        return len(thing)
    names = ["monitor", "requires", "content", "keep_best", "interval", "output", "average", "scheduler_key"]
    names += ["min_delta", "provides", "names", "loader_periods", "every_steps", "save_last", "every_epochs", "weights"]
    names += ["source_model", "target_model"]
    found = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    if isinstance(thing, dl.MetricAggregationCallback):
        found["value"] = thing._aggregate({"a": 1.0, "b": 4.0})
    return found


CHECKPOINT, STOP, STEP, MIX = (
    dl.CheckpointCallback, dl.EarlyStoppingCallback, dl.SchedulerCallback, dl.MixupCallback,
)  # fmt: skip
SOFT = partial(dl.SoftUpdateCallback, tau=0.1, scope="on_batch_end")
TOTAL, PERIODIC, PRUNE = dl.MetricAggregationCallback, dl.PeriodicLoaderCallback, dl.OptunaPruningCallback
OLD = {
    "checkpoint": (
        lambda: CHECKPOINT("logs", loader_key="valid", metric_key="accuracy", minimize=False),
        lambda: CHECKPOINT("logs", monitor="valid/accuracy", mode="max"),
        "monitor='valid/accuracy', mode='max'",
    ),
    "checkpoint by position": (
        lambda: CHECKPOINT("logs", "valid", "loss", True, 3, "runner", False, every_steps=2),
        lambda: CHECKPOINT(
            "logs", monitor="valid/loss", mode="min", keep_best=3, content="runner", save_last=False, every_steps=2
        ),
        "content='runner', keep_best=3, monitor='valid/loss', mode='min'",
    ),
    "checkpoint without a metric, by position": (
        lambda: CHECKPOINT("logs", None, None, None, 1, "model", True, True, 2),
        lambda: CHECKPOINT("logs", every_epochs=2),
        "content='model', keep_best=1",
    ),
    "content": (
        lambda: CHECKPOINT("logs", mode="runner"), lambda: CHECKPOINT("logs", content="runner"), "content='runner'"
    ),
    "weights": (
        lambda: CHECKPOINT("logs", mode="model"), lambda: CHECKPOINT("logs", content="model"), "content='model'"
    ),
    "number of the best": (
        lambda: CHECKPOINT("logs", topk=5), lambda: CHECKPOINT("logs", keep_best=5), "keep_best=5"
    ),
    "number of the best in 21.12": (
        lambda: CHECKPOINT("logs", save_n_best=5), lambda: CHECKPOINT("logs", keep_best=5), "keep_best=5"
    ),
    **{
        f"places of {kind.__name__}": (partial(kind, topk_args=(1, 3)), partial(kind, topk=(1, 3)), "topk=...")
        for kind in WITH_TOPK
    },
    "early stop": (
        lambda: STOP(3, loader_key="valid", metric_key="auc", minimize=False, min_delta=0.1),
        lambda: STOP(3, monitor="valid/auc", mode="max", min_delta=0.1),
        "monitor='valid/auc', mode='max'",
    ),
    "early stop by position": (
        lambda: STOP(3, "valid", "loss", True, 0.1),
        lambda: STOP(3, monitor="valid/loss", min_delta=0.1),
        "monitor='valid/loss', mode='min'",
    ),
    "early stop of a loader with a slash": (
        lambda: STOP(3, "valid/easy", "loss", True), lambda: None, "monitor='valid/easy/loss', mode='min'"
    ),
    "periodic": (
        lambda: PERIODIC("valid", "auc", valid=3, test=0),
        lambda: PERIODIC(monitor="valid/auc", mode="min", valid=3, test=0),
        "monitor='valid/auc', mode='min'",
    ),
    "periodic by name": (
        lambda: PERIODIC(valid_loader_key="valid", valid_metric_key="auc", minimize=False),
        lambda: PERIODIC(monitor="valid/auc", mode="max"),
        "monitor='valid/auc', mode='max'",
    ),
    "pruning": (
        lambda: PRUNE(TRIAL, "valid", "loss"), lambda: PRUNE(TRIAL, monitor="valid/loss"), "monitor='valid/loss'"
    ),
    "pruning by name": (
        lambda: PRUNE(TRIAL, loader_key="valid", metric_key="auc", minimize=False),
        lambda: PRUNE(TRIAL, monitor="valid/auc", mode="max"),
        "monitor='valid/auc', mode='max'",
    ),
    "schedule per epoch": (lambda: STEP(mode="epoch"), lambda: STEP(interval="epoch"), "interval='epoch'"),
    "schedule per step": (lambda: STEP(mode="step"), lambda: STEP(interval="step"), "interval='step'"),
    "schedule per batch": (lambda: STEP("a", "batch"), lambda: STEP("a", interval="step"), "interval='step'"),
    "metric of a schedule": (
        lambda: STEP(mode="epoch", loader_key="valid", metric_key="auc"),
        lambda: STEP(interval="epoch", monitor="valid/auc"),
        "interval='epoch', monitor='valid/auc'",
    ),
    "loader of a schedule": (
        lambda: STEP(loader_key="test"), lambda: STEP(monitor="test/loss", mode="min"), "monitor='test/loss'"
    ),
    "aggregation": (
        lambda: TOTAL("loss", ["a", "b"], mode="sum"), lambda: TOTAL("loss", ["a", "b"], reduction="sum"),
        "reduction='sum'",
    ),
    "aggregation by a function": (
        lambda: TOTAL("loss", ["a", "b"], mode=lambda values: max(values.values())),
        lambda: TOTAL("loss", ["a", "b"], reduction=lambda values: max(values.values())),
        "reduction=...",
    ),
    "mixup": (lambda: MIX("features", mode="add"), lambda: MIX("features", output="add"), "output='add'"),
    "models of a soft update": (
        lambda: SOFT(target_model_key="target", source_model_key="online"), lambda: SOFT("target", "online"),
        "target_model='target', source_model='online'",
    ),
    "sampler": (
        lambda: dl.BalanceClassSampler(LABELS, mode="upsampling"),
        lambda: dl.BalanceClassSampler(LABELS, strategy="upsampling"),
        "strategy='upsampling'",
    ),
    "dynamic sampler": (
        lambda: dl.DynamicBalanceClassSampler(LABELS, mode=2, ignore_warning=True),
        lambda: dl.DynamicBalanceClassSampler(LABELS, strategy=2, ignore_warning=True),
        "strategy=2",
    ),
    "overlap": (lambda: contrib.IoULoss(mode="micro"), lambda: contrib.IoULoss(average="micro"), "average='micro'"),
    "overlap twice": (
        lambda: contrib.DiceLoss(mode="weighted", weights=[1.0]),
        lambda: contrib.DiceLoss(average="weighted", weights=[1.0]),
        "average='weighted'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_warns_once_and_does_the_same(name):
    """The FutureWarning is at the caller's line and says what to write, which does not warn."""
    old, new, words = OLD[name]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = old()

    [warning] = caught
    assert (warning.category, warning.filename) == (FutureWarning, __file__)
    assert str(warning.message).startswith(f"{type(before).__name__}(")
    assert str(warning.message).partition(": write ")[2].startswith(words)
    if (today := new()) is not None:
        assert observed(before) == observed(today) and observed(today)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: STOP(3, monitor="valid/loss", loader_key="valid", metric_key="loss"), ("monitor", "loader_key")),
        (lambda: STOP(3, "valid", "loss", True, monitor="valid/loss"), ("monitor", "metric_key")),
        (lambda: CHECKPOINT("logs", monitor="valid/loss", minimize=True), ("monitor", "minimize")),
        (lambda: CHECKPOINT("logs", topk=3, keep_best=3), ("topk", "keep_best")),
        (lambda: CHECKPOINT("logs", mode="runner", content="runner"), ("mode", "content")),
        (lambda: STEP(mode="epoch", interval="epoch"), ("mode", "interval")),
        (lambda: train(monitor="valid/loss", valid_metric="loss"), ("monitor", "valid_metric")),
        (lambda: train(mode="min", valid_metric="loss"), ("mode", "valid_metric")),
    ],
)
def test_both_names_are_refused(make, words):
    """The error names both."""
    with pytest.raises(ValueError, match="without the old") as error:
        make()
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: STOP(3, monitor="loss"), ValueError, "write monitor='valid/loss'"),
        (lambda: STOP(3, monitor="val_loss"), ValueError, "write monitor='valid/loss'"),
        (lambda: STOP(3, monitor="f1_macro"), ValueError, "write monitor='valid/f1_macro'"),
        (lambda: STOP(3, "valid/loss", "min"), TypeError, "by name: write monitor='valid/loss', mode='min'"),
        (lambda: STOP(3, "valid/loss"), TypeError, "by name: write monitor='valid/loss'"),
        (lambda: PRUNE(TRIAL, "valid/auc", "max"), TypeError, "by name: write monitor='valid/auc', mode='max'"),
        (lambda: CHECKPOINT("logs", "valid/auc", "max"), TypeError, "by name: write monitor='valid/auc', mode='max'"),
        (lambda: CHECKPOINT("logs", "valid"), ValueError, "write for example monitor='valid/loss'"),
        (lambda: train(greater_is_better=True), TypeError, "did you mean 'mode'"),
        (lambda: STOP(3, monitor="valid/"), ValueError, "'loader/metric', got 'valid/'; write monitor='valid/loss'"),
        (lambda: STOP(3, monitor="valid/auc"), ValueError, "write mode='min' if .* else mode='max'"),
        (lambda: STOP(3, monitor="valid/auc", mode="maximum"), ValueError, "mode must be 'min' .* or 'max'"),
        (lambda: STOP(3, monitor="valid/auc", mode=False), ValueError, "mode must be 'min' .* got False"),
        (lambda: STOP(3, monitor=3), TypeError, "monitor must be a str, got 3"),
        (lambda: CHECKPOINT("logs", mode="max"), ValueError, "needs a metric"),
        (lambda: CHECKPOINT("logs", mode="modle"), ValueError, "mode must be 'min' .* or 'max', got 'modle'"),
        (lambda: CHECKPOINT("logs", loader_key="valid"), ValueError, "both loader_key and metric_key"),
        (lambda: STEP(monitor="valid/auc", mode="hourly"), ValueError, "mode must be 'min'"),
        (lambda: STEP(interval="batch"), ValueError, "interval must be 'epoch', 'step' or None, got 'batch'"),
        (lambda: STOP(3, "valid", loader_key="valid"), TypeError, "multiple values .* 'loader_key'"),
        (lambda: train(monitor="accuracy", mode="max"), ValueError, "write monitor='valid/accuracy'"),
        (lambda: train(metric_for_best_model="loss"), TypeError, "did you mean 'monitor'"),
        (lambda: train(monitor="train/auc"), ValueError, "train: monitor='train/auc' needs a mode: write mode='min'"),
        (lambda: train(monitor="train/auc", callbacks=[CHECKPOINT("logs")]), ValueError, "train: .* needs a mode"),
        (lambda: CHECKPOINT("logs", monitor="valid/auc"), ValueError, "CheckpointCallback: .* needs a mode"),
        (lambda: PRUNE(TRIAL, monitor="valid/auc"), ValueError, "OptunaPruningCallback: .* needs a mode"),
        (lambda: PERIODIC(monitor="valid/auc", valid=3), ValueError, "PeriodicLoaderCallback: .* needs a mode"),
    ],
)
def test_what_selects_nothing_is_refused(make, error, words):
    """The error says what to write."""
    with pytest.raises(error, match=words):
        make()


def test_an_absent_value_does_not_warn(tmp_path):
    """A script that hands on None, its own default, gets no warning."""
    assert CHECKPOINT("logs", loader_key=None, metric_key=None, minimize=None).monitor is None
    assert dl.OptimizerCallback(grad_clip_norm=None).grad_clip_fn is None
    train(valid_loader=None, valid_metric=None, minimize_valid_metric=None, logdir=tmp_path)
    assert not (tmp_path / "checkpoints" / "best.pth").exists()


def test_a_monitor_that_does_not_reach_the_callback_is_warned_of(tmp_path, caplog):
    """A CheckpointCallback has a monitor of its own; one that has none selects nothing."""
    loaders, words = {"train": loader(8, 4), "valid": loader(8, 4)}, "pass it there"
    train(loaders=loaders, monitor="valid/loss", callbacks=[CHECKPOINT(tmp_path / "a", monitor="valid/loss")])
    assert words not in caplog.text

    train(loaders=loaders, monitor="valid/loss", callbacks=[CHECKPOINT(tmp_path / "b")])
    assert caplog.text.count(words) == 1 and not (tmp_path / "b" / "checkpoints" / "best.pth").exists()


def test_names_that_callbacks_had_are_read():
    """The attributes have the parts of the monitor, and `checkpoint.topk` sets the number of best checkpoints."""
    stop, save = STOP(3, monitor="valid/auc", mode="max"), CHECKPOINT("logs", monitor="test/loss")
    periodic = PERIODIC(monitor="valid/auc", mode="max")

    save.topk = 4

    assert (stop.loader_key, stop.metric_key, stop.minimize) == ("valid", "auc", False)
    assert (save.loader_key, save.metric_key, save.minimize, save.keep_best) == ("test", "loss", True, 4)
    assert (periodic.valid_loader_key, periodic.valid_metric_key, periodic.minimize) == ("valid", "auc", False)
    assert CHECKPOINT("logs").metric_key is None


def test_a_subclass_may_pass_old_names():
    """The warning is at the line of its `super().__init__`."""

    class Stop(dl.EarlyStoppingCallback):
        def __init__(self):
            super().__init__(3, "valid", "loss", minimize=True)

    with pytest.warns(FutureWarning, match=r"Stop\(loader_key='valid', .*write monitor='valid/loss'") as caught:
        assert Stop().monitor == Monitor("valid", "loss", minimize=True)
    assert caught[0].filename == __file__


def run(folder, **options):
    """Train; return the weights, and what the checkpoints were judged by."""
    loaders = {"train": loader(16, 4), "valid": loader(9, 3, seed=1)}
    callbacks = [dl.AccuracyCallback("logits", "targets")]
    model = mlp()
    train(model, loaders=loaders, callbacks=callbacks, num_epochs=3, logdir=folder, load_best_on_end=True, **options)
    index = json.loads((folder / "checkpoints" / "index.json").read_text())
    return weights(model), [(each["name"], each["score"], each["judged_by"]) for each in index["checkpoints"]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"valid_loader": "valid", "valid_metric": "accuracy", "minimize_valid_metric": False},
            {"monitor": "valid/accuracy", "mode": "max"},
        ),
        ({"valid_metric": "accuracy", "minimize_valid_metric": True}, {"monitor": "valid/accuracy", "mode": "min"}),
        ({"valid_loader": "train"}, {"monitor": "train/loss"}),
        ({"valid_metric": "loss"}, {"monitor": "valid/loss", "mode": "min"}),
    ],
)
def test_train_gives_the_same_by_both_names(tmp_path, old, new):
    """Best weights, scores and index are those of the new names; one warning, at the caller's line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        before = run(tmp_path / "old", **old)
    today = run(tmp_path / "new", **new)

    [warning] = [each for each in caught if each.category is FutureWarning]
    assert str(warning.message).startswith("train(") and f"monitor={new['monitor']!r}" in str(warning.message)
    assert Path(warning.filename).parent.name == "tests"
    assert torch.equal(before[0], today[0]) and before[1] == today[1] and len(today[1]) > 1


def test_a_direction_without_a_metric_is_ignored_as_before(tmp_path):
    """minimize_valid_metric alone keeps no best checkpoint; the warning says to leave it out."""
    with pytest.warns(FutureWarning, match="does nothing without a metric"):
        train(minimize_valid_metric=True, logdir=tmp_path)
    assert not (tmp_path / "checkpoints" / "best.pth").exists()


def test_a_loader_key_may_have_a_slash(tmp_path):
    """The longest loader that exists is meant, of `train` and of callbacks, wrapped or not."""
    loaders = {"train": loader(16, 4), "valid": loader(9, 3, seed=1), "valid/easy": loader(9, 3, seed=2)}
    stop = dl.EarlyStoppingCallback(5, monitor="valid/easy/loss")
    wrapped = dl.ControlFlowCallback(dl.EarlyStoppingCallback(5, monitor="valid/easy/loss"), ignore_epochs=[9])

    train(loaders=loaders, monitor="valid/easy/loss", callbacks=[stop, wrapped], logdir=tmp_path, num_epochs=2)

    assert stop.monitor == wrapped.callback.monitor == Monitor("valid/easy", "loss", minimize=True)
    assert wrapped.requires == (("valid/easy", "loss"),)
    index = json.loads((tmp_path / "checkpoints" / "index.json").read_text())
    judge = {"loader": "valid/easy", "metric": "loss", "minimize": True}
    assert {json.dumps(each["judged_by"]) for each in index["checkpoints"]} == {json.dumps(judge)}
    assert Monitor.of("train", "valid/easy/loss", None).among(["train", "valid"]).metric == "easy/loss"


def test_loaders_of_get_loaders_are_known_before_training():
    """A monitor of a loader that the runner's own `get_loaders` does not make is refused, also without a logdir."""

    class Runner(dl.SupervisedRunner):
        def get_loaders(self, stage):
            return {"train": loader(8, 4), "valid": loader(8, 4)}

    with pytest.raises(ValueError, match=r"monitor='vaild/loss' .*did you mean 'valid'"):
        train(runner=Runner(), loaders=None, monitor="vaild/loss")
    with pytest.raises(KeyError, match=r"monitor='valid/los' .*did you mean 'loss'"):
        train(runner=Runner(), loaders=None, monitor="valid/los", mode="min")


def test_a_scheduler_and_its_monitor_have_one_direction():
    """`mode` of SchedulerCallback is compared with that of ReduceLROnPlateau; without it, any metric is taken."""

    def fit(**options):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
        train(model, optimizer=optimizer, scheduler=plateau, callbacks=[STEP(monitor="train/loss", **options)])

    with pytest.raises(ValueError, match=r"ReduceLROnPlateau\(mode='max'\) would read 'loss' of loader 'train'"):
        fit(mode="min")
    fit(mode="max")
    fit()


def test_old_names_go_away_in_the_version_that_they_announce():
    """Fails when the version is reached: remove the calls of `accepts_old_names` then."""
    assert Version(__version__) < Version(REMOVED_IN)


def test_names_are_found_from_outside():
    """Configs ask for the old names of a class or a function."""
    assert set(old_names(dl.Runner.train)) == {"valid_loader", "valid_metric", "minimize_valid_metric"}
    assert {"topk", "mode", "loader_key"} <= set(old_names(dl.CheckpointCallback))
    assert old_names(dl.TimerCallback) == () and callable(accepts_old_names())
