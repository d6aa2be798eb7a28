"""Tests that callbacks and loggers reject wrong arguments at construction and name the class and the argument."""

from collections import UserDict, UserList, deque
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from runnerkit import dl, metrics
from runnerkit.callbacks.metrics.parts.batch_keys import pick

VALID = {
    dl.EarlyStoppingCallback: {"patience": 3, "monitor": "valid/loss", "mode": "min"},
    dl.CheckpointCallback: {"logdir": "logs"},
    dl.LRFinder: {"final_lr": 1.0},
    dl.ConfusionMatrixCallback: {"input_key": "logits", "target_key": "targets", "num_classes": 2},
    dl.TverskyCallback: {"input_key": "logits", "target_key": "targets", "alpha": 0.5},
    dl.MetricAggregationCallback: {"metric_key": "loss"},
    dl.PeriodicLoaderCallback: {"monitor": "valid/loss"},
    dl.FunctionalBatchMetricCallback: {
        "metric_fn": abs, "metric_key": "mae", "input_key": "logits", "target_key": "targets"
    },
    dl.FreezeCallback: {"patterns": "encoder"},
    dl.ProfilerCallback: {"path": "trace.json"},
    dl.SWACallback: {"start_epoch": 1},
    dl.SklearnModelCallback: {
        "feature_key": "x", "target_key": "y", "train_loader": "train", "valid_loaders": "valid", "model_fn": object
    },
}  # fmt: skip
KEYED = ("Accuracy", "AUC", "Dice", "MAP", "MultilabelAccuracy", "PrecisionRecallF1Support", "R2Squared")
COUNTS = (
    (dl.BatchSizeFinder, "start"),
    (dl.BatchSizeFinder, "num_steps"),
    (dl.CheckRunCallback, "num_batch_steps"),
    (dl.CheckpointCallback, "keep_best"),
    (dl.CheckpointCallback, "every_epochs"),
    (dl.EarlyStoppingCallback, "patience"),
    (dl.FreezeCallback, "from_epoch"),
    (dl.ModelSummaryCallback, "depth"),
    (dl.OptimizerCallback, "accumulation_steps"),
    (dl.ProfilerCallback, "num_batches"),
    (dl.SWACallback, "start_epoch"),
)


@pytest.mark.parametrize(("callback", "name"), COUNTS)
@pytest.mark.parametrize("value", [None, "8", 2.5, True, [], 0, -1])
def test_count_is_an_integer_from_1_on(callback, name, value):
    """Another type or a smaller number raises an error that shows the value."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    error, words = (ValueError, ">= 1") if is_number else (TypeError, "an integer >= 1")

    with pytest.raises(error) as caught:
        callback(**{**VALID.get(callback, {}), name: value})

    assert str(caught.value) == f"{callback.__name__}: {name} must be {words}, got {value!r}"


@pytest.mark.parametrize(
    ("callback", "arguments", "error", "message"),
    [
        (dl.BatchSizeFinder, {"max_size": 2.5}, TypeError, "max_size must be an integer >= 1 or None, got 2.5"),
        (dl.BatchSizeFinder, {"max_size": "8"}, TypeError, "max_size must be an integer >= 1 or None, got '8'"),
        (dl.FreezeCallback, {"patterns": 0}, TypeError, "patterns must be a list of str, got 0"),
        (dl.FreezeCallback, {"patterns": []}, ValueError, "patterns must be a list of one str or more, got []"),
        (dl.FreezeCallback, {"patterns": [2]}, TypeError, "patterns must be a list of str, got [2]"),
        (dl.HangCallback, {"timeout_s": "8"}, TypeError, "timeout_s must be a number > 0, got '8'"),
        (dl.HangCallback, {"timeout_s": 0}, ValueError, "timeout_s must be > 0, got 0"),
        (dl.HangCallback, {"timeout_s": float("nan")}, ValueError, "timeout_s must be > 0, got nan"),
        (dl.LRFinder, {"final_lr": None}, TypeError, "final_lr must be a number > 0, got None"),
        (dl.LRFinder, {"num_steps": 1}, ValueError, "num_steps must be >= 2 or None, got 1"),
        (dl.LRScaleCallback, {"warmup_steps": 2.5}, TypeError, "warmup_steps must be an integer >= 0, got 2.5"),
        (dl.EMACallback, {"decay": "8"}, TypeError, "decay must be a number, got '8'"),
        (dl.EarlyStoppingCallback, {"monitor": None}, TypeError, "monitor must be a str, got None"),
        (dl.MetricAggregationCallback, {"multiplier": []}, TypeError, "multiplier must be a number, got []"),
        (dl.PeriodicLoaderCallback, {"more": "8"}, TypeError,
         "the period of loader 'more' must be a number of epochs >= 0, got '8'"),
        (dl.BatchOverfitCallback, {"train": None}, TypeError,
         "train must be a number of batches >= 1 or a fraction of the loader, got None"),
        (dl.CheckpointCallback, {"logdir": None}, TypeError, "logdir must be a path, got None"),
        (dl.CheckpointCallback, {"every_minutes": 0}, ValueError, "every_minutes must be > 0 or None, got 0"),
        (metrics.ConfusionMatrixMetric, {"class_names": 2}, TypeError,
         "class_names must be a list of str or None, got 2"),
        (metrics.IOUMetric, {"weights": 2.5}, TypeError, "weights must be a list of numbers or None, got 2.5"),
        (metrics.IOUMetric, {"class_dim": "8"}, TypeError, "class_dim must be an integer, got '8'"),
        (dl.OptimizerCallback, {"grad_clip_params": 2}, TypeError,
         "grad_clip_params must be a dict or None, got 2; pass for example grad_clip_params=dict(...)"),
        (dl.PruningCallback, {"amount": None}, TypeError, "amount must be a number, got None"),
        (dl.OnnxCallback, {"opset_version": "8"}, TypeError, "opset_version must be an integer >= 1 or None, got '8'"),
        (dl.TracingCallback, {"filename": 0}, TypeError, "filename must be a str, got 0"),
        (dl.SystemMetricsCallback, {"peak_flops": "8"}, TypeError, "peak_flops must be a number > 0 or None, got '8'"),
        (dl.SklearnModelCallback, {"model_fn": None}, TypeError, "model_fn must be callable, got None"),
        (dl.FunctionalBatchMetricCallback, {"metric_key": 8}, TypeError, "metric_key must be a str or None, got 8"),
        (dl.ConsoleLogger, {"file": "8"}, TypeError, "file must be an open text file or None, got '8'"),
        (dl.CSVLogger, {"logdir": None}, TypeError, "logdir must be a path, got None"),
        (dl.JSONLLogger, {"logdir": 0}, TypeError, "logdir must be a path, got 0"),
        (dl.TensorboardLogger, {"logdir": []}, TypeError, "logdir must be a path, got []"),
        (dl.CometLogger, {"logdir": "logs", "workspace": 8}, TypeError, "workspace must be a str or None, got 8"),
        (dl.WandbLogger, {"logdir": 2.5}, TypeError, "logdir must be a path, got 2.5"),
        (dl.MLflowLogger, {"logdir": "logs", "experiment": None}, TypeError, "experiment must be a str, got None"),
    ],
)  # fmt: skip
def test_wrong_argument_is_named(callback, arguments, error, message):
    """The error names the class, the accepted values and the value that was passed."""
    with pytest.raises(error) as caught:
        callback(**{**VALID.get(callback, {}), **arguments})

    assert str(caught.value) == f"{callback.__name__}: {message}"


@pytest.mark.parametrize("callback", [getattr(dl, f"{name}Callback") for name in KEYED])
@pytest.mark.parametrize("value", [2.5, 0, [3]])
def test_key_of_a_batch_is_a_str(callback, value):
    """A batch key that is not a str raises a TypeError."""
    accepted = "a str, a list of str or {batch key: name} or None"
    words = f"{callback.__name__}: target_key must be {accepted}, got {value!r}"

    with pytest.raises(TypeError) as caught:
        callback("logits", value)

    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("inputs", "targets", "expected"),
    [
        *((kind(["logits"]), kind(["targets"]), {"logits": 1.0, "targets": 0.0}) for kind in (UserList, deque, tuple)),
        (MappingProxyType({"logits": "own"}), UserDict({"targets": "right"}), {"own": 1.0, "right": 0.0}),
    ],
)
def test_keys_of_a_batch_come_in_any_list_or_dict(inputs, targets, expected):
    """Configuration libraries have types that do not derive from `list` and `dict`; names are kept."""
    callback = dl.CriterionCallback(inputs, targets)
    runner = SimpleNamespace(batch={"logits": 1.0, "targets": 0.0}, loader_key="train")

    assert pick(runner, callback.input_key, callback.target_key, reader="test")[1] == expected


@pytest.mark.parametrize("value", ["8", 2.5, 0, True, []])
def test_topk_is_integers_from_1_on(value):
    """`topk` is an integer >= 1 or a sequence of them."""
    with pytest.raises(ValueError, match="AccuracyMetric: topk must be integers >= 1, such as"):
        dl.AccuracyCallback("logits", "targets", topk=value)


def test_numpy_numbers_are_numbers():
    """Arguments may be NumPy scalars, as a hyperparameter search or a data frame yields them."""
    callback = dl.EarlyStoppingCallback(np.int64(3), monitor="valid/loss", mode="min", min_delta=np.float32(0.5))

    assert (callback.patience, callback.min_delta) == (3, 0.5)
