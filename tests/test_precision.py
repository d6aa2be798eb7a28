"""Mixed precision beside what is written by hand with torch.autocast and GradScaler."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, quiet, sgd, weights


class TwoStepsABatch(dl.Runner):
    """The second forward pass reads what the first step wrote, as a GAN's generator reads its discriminator."""

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
    """Autocast casts each weight once per region, and handle_batch is one; bit for bit as by hand."""
    mine, theirs = mlp(), mlp()

    TwoStepsABatch().train(
        model=mine, optimizer=sgd(mine), loaders={"train": loader(32, 4)}, engine=dl.AMPEngine("cpu", dtype=dtype),
        **quiet(),
    )  # fmt: skip
    two_steps_a_batch_by_hand(theirs, sgd(theirs), dtype)

    assert torch.equal(weights(mine), weights(theirs))


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_each_setup_chooses_the_type_for_its_device(first, then):
    """One AMP() goes from a CPU to a GPU and back: float16 with a scaler on the GPU only."""
    precision = dl.AMP()
    chosen = {}
    for kind in (first, then):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where there is no GPU, torch says so
            precision.setup(torch.device(kind))
            chosen[kind] = precision.autocast().fast_dtype, precision.skips_steps

    assert chosen == {"cpu": (torch.bfloat16, False), "cuda": (torch.float16, True)}
    assert precision.dtype is None


class Explode(dl.Callback):
    """Makes every second loss infinite."""

    def __init__(self):
        super().__init__(order=30)

    def on_batch_end(self, runner):
        if runner.loader_batch_step % 2:
            runner.batch_metrics["loss"] = runner.batch_metrics["loss"] * float("inf")


def train(model, optimizer, engine, callbacks=(), **kwargs):
    return dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=optimizer, loaders={"train": loader(40, 4)},
        engine=engine, callbacks=list(callbacks), **quiet(), **kwargs,
    )  # fmt: skip


def fp16():
    return dl.AMPEngine("cpu", dtype=torch.float16)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_fused_optimizer_would_skip_by_itself_are_counted_too(fused):
    """Ten batches, five of them infinite: the schedule advances five times, and the optimizer is left as it came."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=100)
    lr_scale = dl.LRScaleCallback("linear", warmup_steps=5)

    runner = train(model, optimizer, fp16(), [Explode(), lr_scale], scheduler=scheduler)

    assert runner.epoch_metrics["train"]["skipped_steps"] == 5
    assert scheduler.last_epoch == 5 and lr_scale.num_steps == {"": 5}
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused


def test_after_a_run_in_fp16_optimizer_and_engine_are_as_good_as_new():
    """Another precision, and the same engine once more, go on with them."""
    model, engine = mlp(), fp16()
    optimizer = sgd(model)

    train(model, optimizer, engine)
    train(model, optimizer, engine)
    train(model, optimizer, dl.CPUEngine())

    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


class LeavesOut(dl.Runner):
    """Clips, and takes no step where the norm was too large."""

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
    """Under fp16 as in fp32, to fp16's digits: each batch's gradients are unscaled once."""
    norms = []
    small = dl.AMP(torch.float16, scaler={"init_scale": 4.0})  # else the large loss overflows
    for engine in (dl.CPUEngine(), dl.CPUEngine(precision=small)):
        model, runner = mlp(), LeavesOut()
        runner.norms = []
        runner.train(model=model, optimizer=sgd(model), loaders={"train": loader(24, 4)}, engine=engine, **quiet())
        norms.append(runner.norms)

    assert max(norms[0]) > 100
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_one_scale_serves_optimizers_of_one_pace_only():
    """Else it would change in the middle of an accumulation; the message says what to do."""
    models = {"a": mlp(), "b": mlp()}
    steppers = [dl.OptimizerCallback("loss", key, key, accumulation_steps=pace) for key, pace in (("a", 1), ("b", 4))]

    with pytest.raises(ValueError, match=r"accumulate \[1, 4\] batches, but fp16 has one scale"):
        train(models, {key: sgd(each) for key, each in models.items()}, fp16(), [dl.BackwardCallback(), *steppers])


class Fail(dl.Callback):
    def on_batch_end(self, runner):
        raise LookupError("planned")


def test_after_a_failure_nothing_is_left_hanging_on_the_optimizer():
    """Hooks of the precision, of the learning rate's scale and of the scheduler."""
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=100)

    with pytest.raises(LookupError, match="planned"):
        train(model, optimizer, fp16(), [Fail()], scheduler=scheduler, lr_scale="linear")

    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_a_replica_of_data_parallel_enters_autocast_in_its_own_thread():
    """Threads do not see the autocast of the one that started them; a new thread here stands for a replica's."""
    engine = dl.DataParallelAMPEngine("cpu", dtype=torch.bfloat16)
    engine.setup()
    model = engine.wrap(nn.Linear(2, 2))

    with engine.autocast(), ThreadPoolExecutor(1) as pool:
        assert (
            pool.submit(torch.nn.functional.linear, torch.ones(1, 2), torch.ones(2, 2)).result().dtype == torch.float32
        )
        assert pool.submit(model, torch.ones(1, 2)).result().dtype == torch.bfloat16


def test_batches_are_split_over_all_gpus_with_the_wanted_one_first(monkeypatch):
    """Without a GPU the model runs as it is, also on a machine that has some."""
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
