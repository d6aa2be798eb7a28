"""Tests of mixed precision against hand-written loops with torch.autocast and GradScaler."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.interrupt import at
from tests.tiny import loader, mlp, sgd, train, weights


class TwoStepsABatch(dl.Runner):
    """Runner whose second forward pass uses weights that the first step updated, like the generator of a GAN."""

    def handle_batch(self, batch):
        features, targets = batch
        for _ in range(2):
            loss = nn.functional.cross_entropy(self.model(features), targets)
            self.engine.zero_grad(self.optimizer)
            self.engine.backward(loss)
            self.engine.step(self.optimizer)


def two_steps_a_batch_by_hand(model, optimizer, dtype):
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for features, targets in loader(32, 4):
        for _ in range(2):
            with torch.autocast("cpu", dtype=dtype):
                loss = nn.functional.cross_entropy(model(features), targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_forward_pass_after_a_step_in_the_same_batch_sees_the_step(dtype):
    """Two steps in one batch equal a hand-written loop bit for bit, although autocast caches its casts of weights."""
    mine, theirs = mlp(), mlp()

    train(
        mine, runner=TwoStepsABatch(), criterion=None, loaders={"train": loader(32, 4)},
        engine=dl.AMPEngine("cpu", dtype=dtype),
    )  # fmt: skip
    two_steps_a_batch_by_hand(theirs, sgd(theirs), dtype)

    assert torch.equal(weights(mine), weights(theirs))


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_each_setup_chooses_the_type_for_its_device(first, then):
    """An AMP object chooses its dtype for the device at each setup; only the GPU uses float16 and a scaler."""
    precision = dl.AMP()
    chosen = {}
    for kind in (first, then):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns without a GPU
            precision.setup(torch.device(kind))
            chosen[kind] = precision.autocast().fast_dtype, precision.skips_steps

    assert chosen == {"cpu": (torch.bfloat16, False), "cuda": (torch.float16, True)}
    assert precision.dtype is None


def explode():
    def spoil(runner):
        if runner.loader_batch_step % 2:
            runner.batch_metrics["loss"] = runner.batch_metrics["loss"] * float("inf")

    return at("on_batch_end", spoil, order=30)


def fit(model, optimizer, engine, callbacks=(), **options):
    options = {"loaders": {"train": loader(40, 4)}, "callbacks": list(callbacks), **options}
    return train(model, optimizer=optimizer, engine=engine, **options)


def fp16():
    return dl.AMPEngine("cpu", dtype=torch.float16)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_fused_optimizer_would_skip_by_itself_are_counted_too(fused):
    """With five infinite losses in ten batches, the scheduler advances five times and the optimizer is unchanged."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=100)
    lr_scale = dl.LRScaleCallback("linear", warmup_steps=5)

    runner = fit(model, optimizer, fp16(), [explode(), lr_scale], scheduler=scheduler)

    assert runner.epoch_metrics["train"]["skipped_steps"] == 5
    assert scheduler.last_epoch == 5 and lr_scale.num_steps == {"": 5}
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused


class LeavesOut(dl.Runner):
    def handle_batch(self, batch):
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1]) * (1000 if self.batch_step == 2 else 1)
        self.optimizer.zero_grad()
        self.engine.backward(loss)
        self.engine.clip_gradients(self.optimizer, self.clip)
        if self.norms[-1] < 100:
            self.engine.step(self.optimizer)

    def clip(self, parameters):
        self.norms.append(float(nn.utils.clip_grad_norm_(parameters, 1.0)))


def test_a_step_left_out_after_clipping_does_not_spoil_the_next():
    """Gradients are unscaled once per batch even after a skipped step: fp16 norms equal fp32's to fp16's precision."""
    norms = []
    small = dl.AMP(torch.float16, scaler={"init_scale": 4.0})  # avoids an overflow of the large loss
    for engine in (dl.CPUEngine(), dl.CPUEngine(precision=small)):
        model, runner = mlp(), LeavesOut()
        runner.norms = []
        train(model, runner=runner, criterion=None, loaders={"train": loader(24, 4)}, engine=engine)
        norms.append(runner.norms)

    assert max(norms[0]) > 100
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_one_scale_serves_optimizers_of_one_pace_only():
    """Different accumulation_steps raise an error in fp16, because the scale would change during accumulation."""
    models = {"a": mlp(), "b": mlp()}
    steppers = [dl.OptimizerCallback("loss", key, key, accumulation_steps=pace) for key, pace in (("a", 1), ("b", 4))]

    with pytest.raises(ValueError, match=r"accumulate \[1, 4\] batches, but fp16 has one gradient scale for all of"):
        fit(models, {key: sgd(each) for key, each in models.items()}, fp16(), [dl.BackwardCallback(), *steppers])


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_run_nothing_is_left_hanging_on_the_optimizer(fails):
    """A run removes the hooks of the precision, the learning rate scale and the scheduler, also if it failed."""
    model, engine = mlp(), fp16()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=100)

    fit(model, optimizer, engine)
    if fails:
        fail = [at("on_batch_end", lambda runner: 1 / 0)]
        with pytest.raises(ZeroDivisionError):
            fit(model, optimizer, engine, fail, scheduler=scheduler, lr_scale="linear")
    fit(model, optimizer, engine)
    fit(model, optimizer, dl.CPUEngine())

    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_a_replica_of_data_parallel_enters_autocast_in_its_own_thread():
    """A replica of DataParallel enters autocast in its own thread, which does not inherit it."""
    engine = dl.DataParallelAMPEngine("cpu", dtype=torch.bfloat16)
    engine.setup()
    model = engine.wrap(nn.Linear(2, 2))

    with engine.autocast(), ThreadPoolExecutor(1) as pool:
        assert (
            pool.submit(torch.nn.functional.linear, torch.ones(1, 2), torch.ones(2, 2)).result().dtype == torch.float32
        )
        assert pool.submit(model, torch.ones(1, 2)).result().dtype == torch.bfloat16


def test_batches_are_split_over_all_gpus_with_the_wanted_one_first(monkeypatch):
    """Batches are split over all GPUs, the requested one first; a model on the CPU is not wrapped."""
    from runnerkit.engines import data_parallel

    given = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nn, "DataParallel", lambda module, device_ids: given.setdefault(tuple(device_ids), module))
    model = nn.Linear(2, 2)

    assert data_parallel.split_batches(model, torch.device("cpu")) is model and not given
    data_parallel.split_batches(model, torch.device("cuda:1"))
    data_parallel.split_batches(model, torch.device("cuda"))

    assert list(given) == [(1, 0, 2), (0, 1, 2)]
