"""No overhead: a step reads nothing back from the device, whatever it consists of."""

import importlib
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

from runnerkit import dl
from runnerkit.torchvision_cpu import import_torchvision
from tests.tiny import NUM_CLASSES, loader, mlp

import_torchvision()  # torchmetrics imports it, and it may need the cure
classification = importlib.import_module("torchmetrics.classification")

ROOT = Path(__file__).parents[1]
NUM_STEPS, LOG_EVERY = 12, 4
# What waits for a GPU. On the CPU nothing waits, but all that would comes by here: item(), float(), int(), bool(),
# `if tensor`, f"{tensor:.3f}", math.isnan(tensor) end in the first operator; the functions read memory directly.
OPERATORS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::bincount",
}
FUNCTIONS = {"tolist", "numpy", "__array__", "cpu"}


class Watch:
    """Where in this repository the device was waited for, while armed."""

    def __init__(self):
        self.is_armed = False
        self.places = Counter()

    def note(self):
        if self.is_armed:
            self.is_armed = False  # finding the place does not count
            frames = [each for each in traceback.extract_stack()[:-2] if Path(each.filename).is_relative_to(ROOT)]
            own = [each for each in frames if not each.name.startswith("__torch")]
            self.places[f"{Path(own[-1].filename).name}:{own[-1].name}"] += 1
            self.is_armed = True


class WatchOperators(TorchDispatchMode):
    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().split(".")[0] in OPERATORS:
            self.watch.note()
        return func(*args, **(kwargs or {}))


class WatchFunctions(TorchFunctionMode):
    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", None) in FUNCTIONS:
            self.watch.note()
        return func(*args, **(kwargs or {}))


@contextmanager
def watching():
    watch = Watch()
    with WatchFunctions(watch), WatchOperators(watch):
        yield watch


class Arm(dl.Callback):
    """From the end of a loader's first batch to the end of its last: what is between are the steps."""

    def __init__(self, watch):
        super().__init__(order=10_000)
        self.watch = watch

    def on_batch_end(self, runner):
        if not runner.is_train_loader:
            self.watch.is_armed = runner.loader_batch_step < runner.loader_batch_len

    def on_step_end(self, runner):
        self.watch.is_armed = runner.loader_batch_step < runner.loader_batch_len


class StepLog(dl.ILogger):
    """Takes the numbers of single steps."""

    log_batch_metrics = True

    def __init__(self):
        self.steps = []

    def log_scalars(self, scalars, *, step, scope):
        if scope == "batch":
            self.steps.append((step.batch, dict(scalars)))


class Planted(dl.Callback):
    """A callback as somebody might write it."""

    def __init__(self, read):
        super().__init__(order=dl.CallbackOrder.Metric + 1)
        self.read = read

    def on_batch_end(self, runner):
        self.read(runner.batch_metrics["loss"].detach())


def metric_callbacks():
    micro = classification.MulticlassAccuracy(NUM_CLASSES, average="micro", validate_args=False)
    return {
        "accuracy": dl.AccuracyCallback("logits", "targets", topk=(1, 2)),
        "batch": dl.BatchMetricCallback(micro, "logits", "targets"),
        "loader": dl.LoaderMetricCallback(micro, "logits", "targets", metric_key="of_loader"),
        "function": dl.FunctionalBatchMetricCallback(nn.functional.cross_entropy, "again", "logits", "targets"),
        "sum": dl.MetricAggregationCallback("both", ["loss", "again"], mode="sum"),
    }


def train(*, engine, callbacks, log_every=LOG_EVERY):
    model = mlp(dropout=0.1, batch_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    log = StepLog()
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100),
        loaders={"train": loader(NUM_STEPS * 8, 8, shuffle=True), "valid": loader(NUM_STEPS * 8, 8)},
        callbacks=callbacks,
        engine=engine,
        loggers={"console": None, "steps": log},
        log_every=log_every,
        timeit=True,
    )
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
    """Metrics, clipping, accumulation, bf16, a schedule by batches, the timer: the step log alone is read, all at once.

    The first batch of a pass is not among the steps: there the loss is looked at once, so that a run of NaN is told.
    """
    with watching() as watch:
        log = train(engine=make_engine(), callbacks={**metric_callbacks(), **step, "arm": Arm(watch)})

    assert [step for step, _ in log.steps] == [4, 8, 12]
    assert {"loss", "accuracy01", "multiclass_accuracy", "again", "both"} <= log.steps[0][1].keys()
    assert watch.places == {"host_copy.py:_read": 2}, (
        "those of steps 4 and 8, at the next log; the last at the loader's end"
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda loss: loss.item(),
        float,
        lambda loss: 1 if loss > 5 else 0,
        lambda loss: f"{loss:.3f}",
        lambda loss: loss.tolist(),
        lambda loss: loss.cpu(),
        lambda loss: loss.numpy(),
        lambda loss: torch.equal(loss, loss),
    ],
    ids=["item", "float", "if", "format", "tolist", "cpu", "numpy", "equal"],
)
def test_a_callback_that_waits_for_the_device_is_found(read):
    """In each of the steps and of the batches of evaluation, whichever way it reads."""
    with watching() as watch:
        train(engine=dl.CPUEngine(), callbacks={"planted": Planted(read), "arm": Arm(watch)})

    places = {place: count for place, count in watch.places.items() if not place.startswith("host_copy.py")}
    assert sum(places.values()) == 2 * (NUM_STEPS - 1)
    assert all(place.startswith("test_no_host_sync.py") for place in places)


def test_float16_costs_one_read_a_step():
    """torch's own: its gradient scaler asks whether gradients are finite, to skip the step. bf16 needs no scaler."""
    with watching() as watch:
        train(engine=dl.AMPEngine("cpu", dtype=torch.float16), callbacks={"arm": Arm(watch)})

    assert watch.places == {"host_copy.py:_read": 2, "precision.py:step": NUM_STEPS - 1}


def test_what_torchmetrics_itself_reads_is_told_apart():
    """Its counts of several classes call bincount, which waits on a GPU: once in each update, here in each batch."""
    f1 = classification.MulticlassF1Score(NUM_CLASSES, validate_args=False)

    with watching() as watch:
        train(
            engine=dl.CPUEngine(), callbacks={"f1": dl.LoaderMetricCallback(f1, "logits", "targets"), "arm": Arm(watch)}
        )

    assert watch.places == {"host_copy.py:_read": 2, "metric_state.py:update": 2 * (NUM_STEPS - 1)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_not_waited_for():
    """As CUDA itself sees it: torch raises where a step synchronises."""

    class Refuse(Arm):
        def on_batch_end(self, runner):
            super().on_batch_end(runner)
            torch.cuda.set_sync_debug_mode("error" if self.watch.is_armed else "default")

        def on_step_end(self, runner):
            super().on_step_end(runner)
            torch.cuda.set_sync_debug_mode("error" if self.watch.is_armed else "default")

    refuse, rare = Refuse(Watch()), 10 * NUM_STEPS  # no step log within: it is the one that may read
    try:
        train(
            engine=dl.AMPEngine("cuda", dtype=torch.bfloat16),
            callbacks={**metric_callbacks(), "refuse": refuse},
            log_every=rare,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
