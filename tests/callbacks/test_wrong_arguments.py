"""Wrong arguments of callbacks: an error that names them is raised before training."""

import pytest
from torch.nn.functional import l1_loss
from torch.optim import LBFGS
from torch.optim.lr_scheduler import ConstantLR

from runnerkit import dl, metrics
from tests.callbacks.stand_ins import make_runner
from tests.tiny import loader, mlp, sgd, train

DDP = dl.DistributedDataParallelEngine(1, device="cpu")  # without a search for unused parameters

EVERY_SECOND = dl.PeriodicLoaderCallback(monitor="valid/loss", valid=2)


def run(*callbacks, keys=("train", "valid"), **options):
    """Train for three epochs in which the callbacks might act."""
    loaders = {key: loader(16, 4) for key in keys}
    return train(callbacks=list(callbacks), **{"loaders": loaders, "num_epochs": 3, **options})


def swept(**options):
    model = mlp()
    optimizer = sgd(model)
    return run(dl.LRFinder(**options), model=model, scheduler=ConstantLR(optimizer, factor=1.0), optimizer=optimizer)


def best():
    return dl.CheckpointCallback("log", monitor="valid/loss", mode="min", load_best_on_end=True)


def total(metrics=None, **options):
    return dl.MetricAggregationCallback("total", metrics, **options)


def soft(**options):
    return dl.SoftUpdateCallback("target", **{"source_model": "policy", "tau": 0.1, "scope": "on_batch_end", **options})


CONSTRUCTORS = [
    (lambda: dl.AccuracyCallback("x", "y", topk=()), ValueError, r"topk must be integers >= 1.*got \(\)"),
    (lambda: dl.AccuracyCallback("x", "y", topk=(1, 5), num_classes=3), ValueError, r"\(1, 5\) exceeds the 3 classes"),
    (lambda: dl.NDCGCallback("x", "y", topk=(0, 1)), ValueError, r"topk must be integers >= 1.*got \(0, 1\)"),
    (lambda: dl.CMCScoreCallback("x", "y", "q", topk=[]), ValueError, r"topk must be integers >= 1"),
    (lambda: dl.CMCScoreCallback("x", "y", None), TypeError, "is_query_key must be a str.* got None"),
    (lambda: dl.ConfusionMatrixCallback("x", "y"), ValueError, "pass class_names= or num_classes="),
    (lambda: dl.ConfusionMatrixCallback("x", "y", class_names=["a"], num_classes=2), ValueError, "num_classes=2"),
    (lambda: dl.TverskyCallback("x", "y", alpha=2), ValueError, r"alpha must be in \(0, 1\).*got 2"),
    (lambda: dl.LoaderMetricCallback(metrics.AUCMetric, "x", "y"), TypeError, "object with update.* class AUCMetric"),
    (lambda: dl.BatchMetricCallback(l1_loss, "x", "y"), TypeError, "got a function"),
    (lambda: dl.FunctionalBatchMetricCallback("mae", metric_key="mae"), TypeError, "metric_fn must be .*'mae'"),
    (lambda: total("a"), TypeError, "metrics must be a list of names or {name: weight}, got 'a'"),
    (lambda: total([]), ValueError, "metrics is empty"),
    (lambda: total(reduction="median"), ValueError, "reduction must be .* got 'median'"),
    (lambda: total(["a"], reduction="weighted_sum"), ValueError, r"needs metrics={name: weight}, got \['a'\]"),
    (lambda: total({"a": 1.0}, reduction="mean"), ValueError, "reduction='weighted_mean'"),
    (lambda: total({"a": 1, "b": -1}, reduction="weighted_mean"), ValueError, "weights whose sum is not 0"),
    (lambda: total(scope="epoch"), ValueError, "scope must be 'batch' or 'loader', got 'epoch'"),
    (lambda: dl.BatchTransformCallback("flip"), TypeError, "transform must be callable, got 'flip'"),
    (lambda: dl.BatchTransformCallback(abs, "on_batch"), ValueError, "scope must be .* got 'on_batch'"),
    (lambda: dl.BatchTransformCallback(abs, output_key="a"), ValueError, "output_key needs input_key"),
    (lambda: dl.MixupCallback("features", alpha=-1.0), ValueError, "alpha must be >= 0, got -1.0"),
    (lambda: dl.MixupCallback("features", output="append"), ValueError, "output must be .* got 'append'"),
    (lambda: dl.MixupCallback(3), TypeError, "keys must be a list of str, got 3"),
    (lambda: dl.ControlFlowCallback(dl.Callback()), ValueError, "pass exactly one of epochs, .*; got none"),
    (
        lambda: dl.ControlFlowCallback(dl.Callback(), epochs=1, loaders="a"),
        ValueError,
        "got epochs, loaders",
    ),
    (lambda: dl.ControlFlowCallback(dl.Callback(), epochs=0), ValueError, "must be >= 1, got 0"),
    (lambda: dl.ControlFlowCallback(dl.Callback(), epochs="1"), TypeError, "epochs must be a number .*, got '1'"),
    (lambda: dl.ControlFlowCallback(dl.Callback(), ignore_loaders=3), TypeError, "ignore_loaders must be .*, got 3"),
    (
        lambda: dl.ControlFlowCallback(dl.Callback(), filter_fn="s"),
        TypeError,
        "must be a function .* got 's'",
    ),
    (
        lambda: dl.ControlFlowCallback(dl.Callback(), filter_fn=lambda epoch: epoch > 1),
        TypeError,
        r"filter_fn is a function \(epoch\), but is called with stage, epoch and loader, or with epoch and loader",
    ),
    (lambda: dl.CallbackWrapper(dl.TimerCallback), TypeError, "must be a runnerkit Callback, got <class"),
    (lambda: dl.EarlyStoppingCallback(0, monitor="valid/loss", mode="min"), ValueError, "patience must be >= 1, got 0"),
    (
        lambda: dl.EarlyStoppingCallback(1, monitor="valid/a", mode="min", min_delta=-0.1),
        ValueError,
        "min_delta must be >= 0, got -0.1",
    ),
    (
        lambda: dl.PeriodicLoaderCallback(monitor="valid/loss", test=-1),
        ValueError,
        "loader 'test' must be .*>= 0, got -1",
    ),
    (
        lambda: dl.PeriodicLoaderCallback(monitor="valid/loss", test=1.5),
        ValueError,
        "loader 'test' must be .*>= 0, got 1.5",
    ),
    (
        lambda: dl.PeriodicLoaderCallback(monitor="valid/loss", train=2),
        ValueError,
        "'train' runs in every epoch.* got 2",
    ),
    (lambda: dl.PeriodicLoaderCallback(monitor="valid/loss", valid=0), ValueError, "'valid' selects .* >= 1, got 0"),
    (lambda: dl.BatchOverfitCallback(train=0), ValueError, "train must be a number of batches >= 1 .* got 0"),
    (lambda: dl.BatchOverfitCallback(train=-1), ValueError, "or a fraction .* got -1"),
    (lambda: dl.BatchOverfitCallback(train=1.5), ValueError, "or a fraction .* got 1.5"),
    (lambda: dl.CheckRunCallback(num_batch_steps=0), ValueError, "num_batch_steps must be >= 1, got"),
    (lambda: dl.CheckRunCallback(num_epoch_steps=0), ValueError, "num_epoch_steps must be >= 1, got"),
    (lambda: dl.ProfilerCallback("trace.json", num_batches=0), ValueError, "num_batches must be >= 1, got 0"),
    (lambda: dl.ModelSummaryCallback(depth=0), ValueError, "depth must be >= 1, got 0"),
    (lambda: dl.SystemMetricsCallback(peak_flops=0.0), ValueError, "peak_flops must be > 0 or None, got 0.0"),
    (lambda: dl.SystemMetricsCallback(peak_flops=1, flops_per_sample=-1.0), ValueError, "flops_per_sample must be > 0"),
    (lambda: dl.SystemMetricsCallback(flops_per_sample=1.0), ValueError, "only for the MFU: also pass peak_flops="),
    (lambda: soft(tau=2.0), ValueError, r"SoftUpdateCallback: tau must be in \[0, 1\], got 2.0"),
    (lambda: soft(scope="on_stage_end"), ValueError, "scope must be .*on_batch_end.*, got 'on_stage_end'"),
    (lambda: soft(source_model=1), TypeError, "source_model must be a str, got 1"),
    (lambda: dl.LRFinder(1.0, "cosine"), ValueError, "scale must be 'log' or 'linear', got 'cosine'"),
    (lambda: dl.LRFinder(1.0, num_steps=1), ValueError, "num_steps must be >= 2 or None, got 1"),
    (lambda: dl.LRFinder(1.0, num_steps=2.5), TypeError, r"num_steps must be an integer .* got 2\.5"),
    (lambda: dl.LRFinder(1.0).suggestion, RuntimeError, "only after a sweep"),
    (lambda: dl.LRScaleCallback("log"), ValueError, "lr_scale must be 'linear' or 'sqrt', got 'log'"),
    (lambda: dl.LRScaleCallback(warmup_steps=-1), ValueError, "warmup_steps must be >= 0, got -1"),
    (lambda: dl.FreezeCallback("0", from_epoch=0), ValueError, "from_epoch must be >= 1, got 0"),
    (lambda: dl.FreezeCallback("0", from_epoch=3, until_epoch=2), ValueError, "from_epoch=3, until_epoch=2"),
    (lambda: dl.PruningCallback("l7"), ValueError, "pruning_fn must be one of l1_unstructured, .* got 'l7'"),
    (lambda: dl.PruningCallback(amount=0.0), ValueError, r"amount must be a fraction in \(0, 1\) or .* got 0.0"),
    (lambda: dl.PruningCallback(amount=1.5), ValueError, "got 1.5"),
    (lambda: dl.PruningCallback("ln_structured", dim=0), ValueError, "needs dim=.* got dim=0, l_norm=None"),
    (lambda: dl.BatchSizeFinder(start=0), ValueError, "BatchSizeFinder: start must be >= 1, got 0"),
    (lambda: dl.BatchSizeFinder(start=8, max_size=4), ValueError, "max_size must be >= start=8, got 4"),
    (lambda: dl.OnnxCallback(which="first"), ValueError, "which must be 'best' or 'last', got 'first'"),
    (lambda: dl.TracingCallback(filename="model.pth"), ValueError, "writes .pt2 files, got filename='model.pth'"),
    (lambda: dl.EMACallback(1.0), ValueError, "decay must be in"),
    (lambda: dl.SWACallback(0), ValueError, "start_epoch must be >= 1"),
]
RUNS = [
    (lambda: run(optimizer=lambda own: LBFGS(own)), TypeError, r"step\(\) of LBFGS .* closure .*porting"),
    (lambda: swept(final_lr=1.0), ValueError, "leave out the scheduler"),
    (lambda: run(dl.LRFinder(0.01)), ValueError, r"between 0 and final_lr=0\.01, got 0\.1"),
    (lambda: run(dl.LRFinder(1.0), dl.LRFinder(2.0)), ValueError, "two LRFinders sweep .* same optimizer"),
    (lambda: run(dl.LRFinder(1.0, optimizer_key="body")), KeyError, "LRFinder needs optimizer 'body'"),
    (lambda: run(dl.LRFinder(1.0, metric_key="mse")), KeyError, "LRFinder reads metric 'mse'; the batch has"),
    (lambda: run(dl.LRScaleCallback(), lr_scale="linear"), ValueError, "two LRScaleCallbacks scale the same"),
    (lambda: run(dl.LRScaleCallback(optimizer_key="generator")), KeyError, "needs optimizer 'generator'"),
    (lambda: run(dl.FreezeCallback("encoder")), ValueError, r"matches 'encoder'; .* 0.weight, 0.bias, 3.weight, 3.b"),
    (lambda: run(dl.FreezeCallback(["0", "3"])), ValueError, r"freeze all parameters .* \['0', '3'\]"),
    (lambda: run(dl.FreezeCallback("0", model_key="teacher")), KeyError, "needs model 'teacher'; the runner has"),
    (lambda: run(dl.FreezeCallback("0"), engine=DDP), ValueError, r"\(find_unused_parameters=True\)"),
    (lambda: run(dl.PruningCallback(amount=1000)), ValueError, "amount=1000 exceeds the size of 0.weight: 96"),
    (lambda: run(dl.PruningCallback("random_structured", 99, dim=1)), ValueError, "amount=99 .* 0.weight: 6"),
    (lambda: run(dl.PruningCallback("random_structured", dim=2)), ValueError, "dim=2 is out of range for 0.weight"),
    (lambda: run(dl.PruningCallback(layers_to_prune=["7"])), ValueError, r"names '7'; .* \['0', '1', '2', '3'\]"),
    (lambda: run(dl.PruningCallback(layers_to_prune=["1"])), ValueError, r"layer '1' .* \['weight'\] to prune"),
    (lambda: run(dl.PruningCallback(keys_to_prune=["bias"])), ValueError, r"parameters \['bias'\] with two or more"),
    (lambda: run(dl.BatchSizeFinder(), keys=["valid"], optimizer=None), ValueError, r"loaders are \['valid'\]"),
    (lambda: run(dl.BatchSizeFinder(), loaders={"train": iter([])}), ValueError, "'train' yields each batch once"),
    (lambda: run(dl.BatchSizeFinder(), resume="auto", logdir="log"), ValueError, "leave out resume"),
    (lambda: run(dl.MixupCallback(["features", "labels"])), KeyError, "mixes .* of a batch, which has .*targets"),
    (lambda: run(dl.MixupCallback(["features", "targets"])), TypeError, r"'targets' is torch\.int64.* one-hot"),
    (lambda: run(dl.TracingCallback()), ValueError, "TracingCallback needs a folder to write to: pass logdir="),
    (lambda: run(dl.OnnxCallback(which="best"), logdir="log"), ValueError, "needs a best checkpoint"),
    (lambda: run(dl.TracingCallback(model_key="teacher"), logdir="log"), KeyError, "needs model 'teacher'"),
    (lambda: run(dl.TracingCallback("pixels"), logdir="log"), KeyError, "TracingCallback reads 'pixels' of a batch"),
    (lambda: run(dl.GradNormCallback(optimizer_key="teacher")), KeyError, "an OptimizerCallback for optimizer 'teach"),
    (lambda: run(dl.EMACallback(model_key="generator")), KeyError, "averages model 'generator'"),
    (lambda: run(dl.SWACallback(4)), ValueError, "start_epoch=4 exceeds the stage's 3 epochs"),
    (lambda: run(dl.EMACallback(), dl.SWACallback(1)), ValueError, "both average the models"),
    (lambda: run(dl.SWACallback(1, validate=True), model=mlp(batch_norm=True)), ValueError, "only at the end"),
    (lambda: run(dl.EMACallback(), model=mlp().bfloat16()), ValueError, "torch.bfloat16 rounds"),
    (lambda: run(dl.EMACallback(validate=False), best()), ValueError, "never evaluated"),
    (lambda: run(dl.BatchOverfitCallback(trian=2)), ValueError, r"loader 'trian'; .* \['train', 'valid'\]"),
    (
        lambda: run(dl.PeriodicLoaderCallback(monitor="valid/loss", vaild=2)),
        ValueError,
        r"loader 'vaild'; .* \['train'",
    ),
    (lambda: run(EVERY_SECOND, keys=["valid"], optimizer=None), ValueError, "no loader runs in epoch 1"),
]
STOP, RUNNER = (
    dl.EarlyStoppingCallback(2, monitor="valid/score", mode="min"),
    make_runner(epoch_metrics={"valid": {"a": 1}}),
)
EVENTS = [
    (lambda: STOP.on_epoch_end(RUNNER), KeyError, r"watches metric 'score' of loader 'valid', .* only \['a'\]"),
    (lambda: total(["z"]).on_batch_end(make_runner()), KeyError, r"computes 'total' from \['z'\]; batch_metrics has"),
    (
        lambda: dl.BatchOverfitCallback().on_epoch_start(make_runner(loaders={"train": iter([1])})),
        TypeError,
        r"loader 'train' must have a len\(\)",
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), [*CONSTRUCTORS, *RUNS, *EVENTS])
def test_an_error_names_what_is_wrong(make, error, words, tmp_path, monkeypatch):
    """It is raised by the constructor, before training, or in the first batch or epoch that shows it."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(error, match=words):
        make()
