"""Tests that training and evaluation steps do not synchronize the host with the device."""

import importlib
import io
import statistics
import traceback
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runnerkit import callbacks, dl
from runnerkit.torchvision_cpu import import_torchvision
from tests.tiny import NUM_CLASSES, NUM_FEATURES, loader, mlp, sgd, train

import_torchvision()  # torchmetrics imports torchvision, which may need the workaround
classification = importlib.import_module("torchmetrics.classification")

ROOT = Path(__file__).parents[1]
NUM_STEPS, LOG_EVERY = 12, 4
NUM_READS = 2 * (NUM_STEPS - 1)  # of a callback that reads in every batch
STEP_LOG = 2  # reads, of steps 4 and 8; the last is read at the loader's end
# Calls that synchronize with a GPU, detected here on the CPU, where they do not wait: item(), float(), int(), bool(),
# `if tensor`, f"{tensor:.3f}" and math.isnan(tensor) reach the first operator, x[mask] an index; the functions read
# memory directly. Not detected, because the CPU has nothing to do: .to() with a device variable or another tensor.
OPERATORS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select"}
OPERATORS |= {"aten::_unique2", "aten::bincount"}
FUNCTIONS = {"tolist", "numpy", "__array__", "cpu"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Watch:
    """Counter of host synchronizations by their place in this repository, while armed."""

    def __init__(self):
        self.is_armed = False
        self.places = Counter()

    @property
    def count(self):
        return self.places.total()

    def note(self):
        if self.is_armed:
            self.is_armed = False  # the search for the place must not count
            frames = [each for each in traceback.extract_stack()[:-2] if not each.name.startswith("__torch")]
            own = [each for each in frames if is_of_this_repository(Path(each.filename))] or frames
            self.places[f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "no Python"] += 1
            self.is_armed = True


def is_of_this_repository(path):
    """Return True for a file of this repository, but not of a virtual environment within it."""
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts


def counts_what_is_true(operator, args):
    """Return True if an index is a mask, because only the device knows its number of True elements."""
    if operator not in INDEXING:
        return False
    masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
    is_filled = len(args) > 2 and args[2].numel() == 1  # x[mask] = 0 needs no count
    return bool(masks) and not is_filled


def copies_to_the_host(function, args, kwargs):
    """Return True for .to("cpu"), in any spelling of the literal."""
    targets = [*args[1:2], (kwargs or {}).get("device")]
    return function == "to" and any(isinstance(each, str) and each.startswith("cpu") for each in targets)


class WatchOperators(TorchDispatchMode):
    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name in OPERATORS or counts_what_is_true(name, args):
            self.watch.note()
        return func(*args, **(kwargs or {}))


class WatchFunctions(TorchFunctionMode):
    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", None)
        if name in FUNCTIONS or copies_to_the_host(name, args, kwargs):
            self.watch.note()
        return func(*args, **(kwargs or {}))


@contextmanager
def watching():
    watch = Watch()
    with WatchFunctions(watch), WatchOperators(watch):
        yield watch


class Arm(dl.Callback):
    """Arms the watch from the end of a loader's first batch to the end of its last."""

    def __init__(self, watch):
        super().__init__(order=10_000)
        self.watch = watch

    def on_batch_end(self, runner):
        if not runner.is_train_loader or runner.loader_batch_step < runner.loader_batch_len:
            self.watch.is_armed = runner.loader_batch_step < runner.loader_batch_len

    def on_step_end(self, runner):
        self.watch.is_armed = runner.loader_batch_step < runner.loader_batch_len


class StepLog(dl.ILogger):
    log_batch_metrics = True

    def __init__(self):
        self.steps = []

    def log_scalars(self, scalars, *, step, scope):
        if scope == "batch":
            self.steps.append((step.batch, dict(scalars)))


class Planted(dl.Callback):
    """Callback that reads a metric, as a user-defined callback might."""

    def __init__(self, read):
        super().__init__(order=dl.CallbackOrder.Metric + 1)
        self.read = read

    def on_batch_end(self, runner):
        self.read(runner.batch_metrics["loss"].detach())


def with_columns(batch):
    """Add the columns that metrics of other tasks read to a batch with logits and classes of shape (N,)."""
    classes = torch.arange(NUM_CLASSES, device=batch["targets"].device)
    of_classes = batch["targets"][:, None] == classes
    return {
        **batch,
        "probabilities": batch["logits"].softmax(dim=1),
        "labels": of_classes,
        "values": of_classes.float(),
        "is_query": batch["targets"] == 0,
    }


def metric_callbacks():
    """Return all metric callbacks, and data augmentation."""
    micro = classification.MulticlassAccuracy(NUM_CLASSES, average="micro", validate_args=False)
    both = {"compute_per_class_metrics": True}
    augmentation = nn.Sequential(
        nn.Unflatten(1, (1, 2, NUM_FEATURES // 2)),
        dl.BatchRandomCrop(padding=1),
        dl.BatchRandomHorizontalFlip(),
        dl.BatchNormalize([0.0], [1.0]),
        nn.Flatten(),
    )
    return {
        "augment": dl.BatchTransformCallback(augmentation, input_key="features"),
        "columns": dl.BatchTransformCallback(with_columns, "on_batch_end"),
        "f1": dl.PrecisionRecallF1SupportCallback("logits", "targets", **both),
        "labels_f1": dl.MultilabelPrecisionRecallF1SupportCallback("logits", "labels", prefix="labels_", **both),
        "labels": dl.MultilabelAccuracyCallback("logits", "labels", torch.zeros(NUM_CLASSES), prefix="labels_"),
        "auc": dl.AUCCallback("logits", "targets"),
        "confusion": dl.ConfusionMatrixCallback("logits", "targets", num_classes=NUM_CLASSES),
        "r2": dl.R2SquaredCallback("logits", "values"),
        "iou": dl.IOUCallback("logits", "values", threshold=0.0, **both),
        "dice": dl.DiceCallback("probabilities", "values", weights=[0.2, 0.3, 0.5]),
        "tversky": dl.TverskyCallback("probabilities", "values", alpha=0.3),
        "hitrate": dl.HitrateCallback("logits", "values", topk=(1, 2)),
        "mrr": dl.MRRCallback("logits", "values"),
        "map": dl.MAPCallback("logits", "values"),
        "ndcg": dl.NDCGCallback("logits", "values", topk=(1, 2)),
        "cmc": dl.CMCScoreCallback("logits", "targets", "is_query"),
        "accuracy": dl.AccuracyCallback("logits", "targets", topk=(1, 2)),
        "batch": dl.BatchMetricCallback(micro, "logits", "targets"),
        "loader": dl.LoaderMetricCallback(micro, "logits", "targets", metric_key="of_loader"),
        "function": dl.FunctionalBatchMetricCallback(nn.functional.cross_entropy, metric_key="again"),
        "reordered": dl.FunctionalMetricCallback("logits", "targets", nn.functional.cross_entropy, "once_more"),
        "sum": dl.MetricAggregationCallback("both", ["loss", "again"], reduction="sum"),
        "system": dl.SystemMetricsCallback(),
    }


def fit(*, callbacks, engine=None, loggers=None, log_every=LOG_EVERY, **options):
    model, log = mlp(dropout=0.1, batch_norm=True), StepLog()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
    loaders = {"train": loader(NUM_STEPS * 8, 8, shuffle=True), "valid": loader(NUM_STEPS * 8, 8)}
    options = {"loggers": {"steps": log, **(loggers or {})}, "log_every": log_every, "timeit": True, **options}
    options = {"engine": engine or dl.CPUEngine(), "callbacks": callbacks, "loaders": loaders, **options}
    train(model, optimizer=optimizer, scheduler=scheduler, **options)
    return log


def clipping(**kwargs):
    return {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": 1.0}, **kwargs}


@pytest.mark.parametrize("make_engine", [dl.CPUEngine, partial(dl.AMPEngine, "cpu", dtype=torch.bfloat16)])
@pytest.mark.parametrize(
    "step",
    [
        {"optimizer": dl.OptimizerCallback("loss", accumulation_steps=2, **clipping())},
        {"backward": dl.BackwardCallback("loss", **clipping(log_gradient=True))},
    ],
    ids=["accumulated and clipped", "clipped, its norm logged"],
)
def test_steps_read_from_the_device_once_in_log_every(make_engine, step):
    """With all metrics, clipping, accumulation, bf16, a scheduler and a timer, only the step log reads, all at once.

    The first batch of a pass is not counted: there the loss is checked once for NaN.
    """
    with watching() as watch:
        norm = dl.GradNormCallback(per_parameter=True)
        callbacks = {**metric_callbacks(), **step, "average": dl.EMACallback(), "norm": norm, "arm": Arm(watch)}
        in_steps = LOG_EVERY // 2 if "optimizer" in step else LOG_EVERY
        log = fit(engine=make_engine(), callbacks=callbacks, log_every=in_steps)

    assert [step for step, _ in log.steps] == [4, 8, 12]
    assert {"loss", "accuracy", "multiclass_accuracy", "again", "both"} <= log.steps[0][1].keys()
    # On the CPU, two callbacks check the classes of two columns each; three overlaps, the smallest and largest of five;
    # four rankings, the relevances.
    on_the_cpu_only = (4 + 10 + 4) * NUM_READS
    targets = 1 if "optimizer" in step else 0  # of the first batch: are some ignored? as the loss averages the others
    assert watch.count == STEP_LOG + on_the_cpu_only + targets, watch.places
    assert len(log.steps[0][1]) > 50


def test_neither_logs_nor_checkpoints_nor_a_bar_read_more(tmp_path, monkeypatch):
    """Step logs, the search for non-finite metrics, timed checkpoints and the progress bar cause no further reads.

    tests/callbacks/test_progress.py counts the reads of the bar, a few per second.
    """

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setattr("runnerkit.callbacks.monitor.progress.REFRESH_S", 1e9)
    kinds = {"csv": dl.CSVLogger, "tensorboard": dl.TensorboardLogger}
    loggers = {name: kind(tmp_path, log_batch_metrics=True) for name, kind in kinds.items()}

    with watching() as watch:
        save = dl.CheckpointCallback(tmp_path, monitor="valid/loss", mode="min", content="runner", every_minutes=60)
        options = {"loggers": loggers, "logdir": tmp_path, "verbose": True, "non_finite": "raise"}
        fit(callbacks={"save": save, "arm": Arm(watch)}, **options)

    assert watch.count == STEP_LOG, watch.places
    assert "Epoch (valid)" in terminal.getvalue() and (tmp_path / "checkpoints" / "best.pth").exists()
    assert len((tmp_path / "csv" / "train.batch.csv").read_text().splitlines()) == 1 + NUM_STEPS // LOG_EVERY


def test_that_list_is_complete():
    """The tests above cover all metric callbacks but a former name and those of scikit-learn, which use the CPU."""
    here = {type(each) for each in metric_callbacks().values()}
    names = (getattr(callbacks, name) for name in callbacks.__all__)
    exported = {each for each in names if isinstance(each, type) and issubclass(each, dl.IMetricCallback)}

    of_sklearn = {dl.SklearnBatchCallback, dl.SklearnLoaderCallback, dl.SklearnModelCallback}
    assert exported - here == {dl.IMetricCallback, dl.TrevskyCallback} | of_sklearn


READS = {
    "item": lambda loss: loss.item(),
    "float": float,
    "if": lambda loss: 1 if loss > 5 else 0,
    "format": lambda loss: f"{loss:.3f}",
    "tolist": lambda loss: loss.tolist(),
    "cpu": lambda loss: loss.cpu(),
    "numpy": lambda loss: loss.numpy(),
    "equal": lambda loss: torch.equal(loss, loss),
    "mask": lambda loss: loss[loss > 5],
    "mask of rows": lambda loss: torch.stack([loss, loss])[torch.tensor([True, False])],
    "mask that is written to": lambda loss: torch.zeros(3).index_put_((torch.ones(3).bool(),), torch.ones(3)),
    "to": lambda loss: loss.to("cpu"),
    "to device": lambda loss: loss.to(device="cpu"),
    "read by another module": lambda loss: statistics.fmean([loss]),
}


@pytest.mark.parametrize("name", READS)
def test_a_callback_that_waits_for_the_device_is_found(name):
    """Every kind of read is counted in every training step and evaluation batch."""
    with watching() as watch:
        fit(callbacks={"planted": Planted(READS[name]), "arm": Arm(watch)})

    assert watch.count == STEP_LOG + NUM_READS, watch.places


def test_float16_costs_one_read_a_step():
    """In float16, torch's gradient scaler reads once per step whether gradients are finite; bf16 needs no scaler."""
    with watching() as watch:
        fit(engine=dl.AMPEngine("cpu", dtype=torch.float16), callbacks=[Arm(watch)])

    assert watch.count == STEP_LOG + NUM_STEPS - 1, watch.places


def test_what_torchmetrics_itself_reads_is_told_apart():
    """Multi-class metrics of torchmetrics call bincount, which waits for a GPU, once per update, here in each batch."""
    f1 = classification.MulticlassF1Score(NUM_CLASSES, validate_args=False)

    with watching() as watch:
        fit(callbacks=[dl.LoaderMetricCallback(f1, "logits", "targets"), Arm(watch)])

    assert watch.count == STEP_LOG + NUM_READS, watch.places


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_not_waited_for():
    """With CUDA's sync debug mode "error", no step synchronizes, except for the step log, which is read after it."""

    class Refuse(Arm):
        def on_batch_end(self, runner):
            super().on_batch_end(runner)
            is_logged = runner.is_train_loader and runner.batch_step % LOG_EVERY == 0
            torch.cuda.set_sync_debug_mode("error" if self.watch.is_armed and not is_logged else "default")

        def on_step_end(self, runner):
            super().on_step_end(runner)
            torch.cuda.set_sync_debug_mode("error" if self.watch.is_armed else "default")

    try:
        log = fit(
            engine=dl.AMPEngine("cuda", dtype=torch.bfloat16),
            callbacks={**metric_callbacks(), "average": dl.EMACallback(), "refuse": Refuse(Watch())},
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert [step for step, _ in log.steps] == [4, 8, 12]
