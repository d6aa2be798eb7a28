"""examples/mixed_precision.py learns, and its steps equal the hand-written ones in
benchmarks/mixed_precision/raw.py."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.mixed_precision import ours, raw, work
from examples import mixed_precision
from runnerkit import dl
from tests.engines.together import together
from tests.tiny import weights

CPU = torch.device("cpu")
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TOO_LARGE = {"init_scale": 2.0**24}  # fp16's first steps overflow and are skipped
NUM_STEPS = 23  # of an epoch: 1437 digits, 64 per step


class Evidence(dl.Callback):
    """A callback that records this rank's batch and loss in each step, and the weights after it; it ends the run."""

    def __init__(self, num_epochs):
        super().__init__(order=dl.CallbackOrder.External)
        self.num_epochs = num_epochs
        self.batches, self.losses, self.weights = [], [], []

    def on_batch_end(self, runner):
        if runner.is_train_loader:
            self.batches.append((runner.batch["features"], runner.batch["targets"]))
            self.losses.append(runner.batch_metrics["loss"].detach().clone())
            self.weights.append(weights(runner.engine.unwrap(runner.model)))

    def on_epoch_end(self, runner):
        runner.need_early_stop = runner.epoch_step == self.num_epochs


class Weighted(torch.amp.GradScaler):
    """Weights the losses of the last step of an epoch, in which two processes share 29 samples as 15 and 14."""

    def __init__(self, batches, **options):
        super().__init__("cpu", **options)
        self.sizes = iter([len(targets) for _, targets in batches])

    def scale(self, loss):
        size = next(self.sizes)
        return super().scale(loss * (2 * size / 29) if size < 16 else loss)


def by_hand(way, batches, dtype):
    """Train on the same batches; return the losses and the weights after each step."""
    torch.manual_seed(0)
    model = mixed_precision.CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kind = partial(Weighted, batches) if way == "ddp" else partial(torch.amp.GradScaler, "cpu")
    scaler = kind(enabled=dtype == torch.float16, **TOO_LARGE)
    losses, states = [], []
    for loss in raw.RECIPES[way](model, optimizer, batches, device=CPU, dtype=dtype, scaler=scaler):
        losses.append(loss)
        states.append(weights(model))
    return losses, states


def both(way, dtype, store=None, *, num_epochs=1):
    """Train the example, then the hand-written loop on its batches; return (losses, weights) of each, and the
    metrics."""
    precision, evidence = None if dtype is None else dl.AMP(dtype, scaler=TOO_LARGE), Evidence(num_epochs)
    runner = mixed_precision.train(mixed_precision.make_engine(way, precision, device="cpu"), [evidence])
    if way == "ddp":
        place = {"rank": runner.engine.rank, "world_size": runner.engine.num_processes}
        dist.init_process_group("gloo", init_method=f"file://{store}", **place)
    theirs = by_hand(way, evidence.batches, dtype)
    if way == "ddp":
        dist.destroy_process_group()
    return (evidence.losses, evidence.weights), theirs, runner.experiment_metrics


def assert_alike(mine, theirs):
    """Check that each step's loss and weights agree to 1e-6."""
    for own, expected in zip(mine, theirs, strict=True):
        assert len(own) == len(expected) and len(own) % NUM_STEPS == 0
        torch.testing.assert_close(torch.stack(own), torch.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "precision", "num_epochs"),
    [
        ("one", "fp32", 3), ("one", "bf16", 1), pytest.param("one", "fp16", 1, marks=pytest.mark.slow),
        ("dp", "fp32", 1), ("dp", "bf16", 1),
    ],
)  # fmt: skip
def test_one_process_steps_as_by_hand(monkeypatch, way, precision, num_epochs):
    """Autocast and GradScaler match, skipped steps included; DataParallel's replica enters autocast in its forward
    pass."""
    if precision != "fp32":  # in 16 bits, a CPU takes up to half a minute for the example's width
        monkeypatch.setattr(mixed_precision, "CNN", partial(mixed_precision.CNN, width=4))
    mine, theirs, metrics = both(way, DTYPES[precision], num_epochs=num_epochs)

    assert_alike(mine, theirs)
    assert (metrics[1]["train"].get("skipped_steps", 0) > 0) == (precision == "fp16")
    assert len(metrics) == num_epochs and (num_epochs == 1 or metrics[3]["valid"]["accuracy"] > 0.9)


@pytest.mark.slow
def test_two_processes_step_as_by_hand(tmp_path):
    """DDP finds unused parameters, and losses are rank zero's; batch norms are per process, as always on a CPU."""
    found = together(lambda: {name: both("ddp", DTYPES[name], tmp_path / name) for name in ("fp32", "bf16")})

    for mine, theirs, _ in found.values():
        assert_alike(mine, theirs)


def test_the_head_that_no_step_uses_is_why_ddp_looks_for_it(tmp_path):
    """Without find_unused_parameters, the second step fails."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    images = torch.rand(8, 1, 8, 8)

    for looks in (True, False):
        model = DistributedDataParallel(mixed_precision.CNN(), find_unused_parameters=looks)
        model(images).sum().backward()
        if looks:
            model(images)
        else:
            with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
                model(images)
    dist.destroy_process_group()


def test_on_gpus_batch_norms_are_synchronized(monkeypatch):
    """The arguments passed to DDP are checked without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = []

    def wrapped(*args, **kwargs):
        given.append((args, kwargs))
        return SimpleNamespace(process_group=None)

    monkeypatch.setattr("runnerkit.engines.ddp.UnrecordedDDP", wrapped)
    engine = mixed_precision.make_engine("ddp", dl.AMP(), device="cpu")
    engine.device = torch.device("cuda", 0)

    engine.wrap(mixed_precision.CNN())

    (((model,), arguments),) = given
    norms = [module for module in model.modules() if "BatchNorm" in type(module).__name__]
    assert [type(norm) for norm in norms] == [nn.SyncBatchNorm, nn.SyncBatchNorm]
    assert arguments["find_unused_parameters"] and engine.switches.cudnn_benchmark


@pytest.mark.slow
def test_each_way_learns_and_one_line_says_so(capsys):
    """Chance is 0.1; per-process batch norms lose little."""
    learned = mixed_precision.main([])

    assert capsys.readouterr().out.count("valid accuracy") == 1
    assert learned.keys() == {"one", "dp", "ddp"}
    assert min(learned.values()) > 0.9


@pytest.mark.parametrize(("way", "precision"), [("one", "fp32"), ("dp", "amp")])
def test_the_rows_of_the_table_did_the_same_work(way, precision, monkeypatch, capsys):
    """The hand-written loop and the engine agree on the loss to 1e-6 and on accuracy, and report time and memory."""
    monkeypatch.setitem(work.SIZES, "cpu", work.Size(8, width=4, batch_size=128, num_epochs=2))
    monkeypatch.setattr(work, "_keep_memory", lambda: None)
    monkeypatch.setattr("sys.argv", ["raw", way, precision])

    for train in (raw.train, ours.train):
        work.main(train)
    by_hand, mine = map(json.loads, capsys.readouterr().out.splitlines())

    assert mine["same"]["loss"] == pytest.approx(by_hand["same"]["loss"], abs=1e-6)
    assert mine["accuracy_percent"] == by_hand["accuracy_percent"]
    for report in (by_hand, mine):
        assert report["samples_per_s"] > 0 and report["fullest_mib"] >= report["emptiest_mib"] >= 0
