"""`gradient_clip` with several optimizers: one norm over all gradients of a step, as in a hand-written loop."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runnerkit import dl
from tests.engines.together import together
from tests.tiny import loader, mlp, train, weights

LR = {"encoder": 0.1, "head": 0.05}
MAX_NORM = 0.05
NUM_SAMPLES, BATCH_SIZE = 44, 8  # the last batch of an epoch has 4 samples


class TwoParts(dl.Runner):
    def handle_batch(self, batch):
        features, targets = batch
        logits = self.model["head"](self.model["encoder"](features))
        self.batch_metrics["loss"] = F.cross_entropy(logits, targets)


def parts():
    model = mlp(seed=3)
    return {"encoder": model[:1], "head": model[1:]}


def sgd_of(models):
    return {key: torch.optim.SGD(each.parameters(), lr=LR[key], momentum=0.9) for key, each in models.items()}


def by_hand(*, accumulate=1, scaler=None, max_norm=MAX_NORM, paces=None):
    """Two epochs with one clip_grad_norm_ over the gradients of all optimizers that step."""
    models = parts()
    optimizers = sgd_of(models)
    paces = paces or dict.fromkeys(models, accumulate)
    scale = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        batches = list(loader(NUM_SAMPLES, BATCH_SIZE))
        sizes = dict.fromkeys(models, 0)
        for number, (features, targets) in enumerate(batches, start=1):
            with torch.autocast("cpu", torch.float16) if scaler else nullcontext():
                logits = models["head"](models["encoder"](features))
                loss = F.cross_entropy(logits, targets) * (len(targets) / BATCH_SIZE)
            scale.scale(loss).backward()
            due = [key for key, pace in paces.items() if number % pace == 0 or number == len(batches)]
            for key in models:
                sizes[key] += len(targets)
            for key in due:
                scale.unscale_(optimizers[key])
                for each in models[key].parameters():
                    each.grad /= sizes[key] / BATCH_SIZE
                sizes[key] = 0
            nn.utils.clip_grad_norm_([each for key in due for each in models[key].parameters()], max_norm)
            for key in due:
                scale.step(optimizers[key])
                optimizers[key].zero_grad()
            if due:
                scale.update()
    return weights(nn.ModuleDict(models))


def fit(models, *callbacks, batch_size=BATCH_SIZE, **options):
    options = {"optimizer": sgd_of(models), "gradient_clip": MAX_NORM, "runner": TwoParts(), **options}
    loaders = {"train": loader(NUM_SAMPLES, batch_size)}
    return train(models, loaders=loaders, callbacks=[dl.BackwardCallback("loss"), *callbacks], **options)


def trained(*others, paces=None, **options):
    models, paces = parts(), paces or {}
    steppers = [dl.OptimizerCallback("loss", optimizer_key=key, accumulation_steps=paces.get(key, 1)) for key in models]
    runner = fit(models, *steppers, *others, num_epochs=2, **options)
    return weights(nn.ModuleDict(models)), runner


@pytest.mark.parametrize("accumulate", [1, 3])
def test_all_gradients_of_a_step_have_one_norm(accumulate):
    """The weights are those of the hand-written loop, and far from those of a norm for each optimizer."""
    expected = by_hand(accumulate=accumulate)

    actual, _ = trained(accumulation_steps=accumulate)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)
    assert (by_hand(accumulate=accumulate, max_norm=1e9) - expected).abs().max() > 1e-2


def test_optimizers_of_different_paces_share_the_norm_where_both_step():
    """One steps on every batch, the other on every second; both at the end of the epoch."""
    paces = {"encoder": 1, "head": 2}

    actual, _ = trained(paces=paces)

    torch.testing.assert_close(actual, by_hand(paces=paces), rtol=0, atol=1e-7)


def test_a_backward_callback_clips_the_gradients_of_all_that_step_on_its_loss():
    """Those of the first optimizer only were clipped."""
    models = parts()
    callbacks = [dl.OptimizerCallback("loss", optimizer_key=key) for key in models]
    callbacks += [dl.BackwardCallback("loss", gradient_clip=MAX_NORM)]
    options = {"runner": TwoParts(), "optimizer": sgd_of(models), "num_epochs": 2}
    train(models, loaders={"train": loader(NUM_SAMPLES, BATCH_SIZE)}, callbacks=callbacks, **options)

    torch.testing.assert_close(weights(nn.ModuleDict(models)), by_hand(), rtol=0, atol=1e-7)


def test_under_a_gradient_scaler_all_are_unscaled_first():
    """fp16 with a scale that overflows at first: the skipped steps are those of the hand-written loop."""
    scaler = {"init_scale": 2.0**20, "growth_interval": 3}
    expected = by_hand(scaler=torch.amp.GradScaler("cpu", **scaler))

    actual, runner = trained(engine=dl.CPUEngine(precision=dl.AMP(torch.float16, scaler=scaler)))

    assert "skipped_steps_head" in runner.epoch_metrics["train"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)


def test_an_optimizer_that_does_not_act_takes_no_part():
    """Of an excluded optimizer, old gradients do not count in the norm."""
    models = parts()
    before = weights(models["head"])

    class OnlyOne(dl.ControlFlowCallback):
        def __init__(self, callback):
            super().__init__(callback, filter_fn=lambda stage, epoch, key: callback.optimizer_key == "encoder")

    both = fit(models, *(OnlyOne(dl.OptimizerCallback("loss", optimizer_key=key)) for key in models))
    one = parts()
    for each in one["head"].parameters():
        each.requires_grad_(False)
    fit(one, dl.OptimizerCallback("loss"), optimizer=sgd_of({"encoder": one["encoder"]})["encoder"])
    assert both.optimizer_step == 6
    torch.testing.assert_close(weights(models["encoder"]), weights(one["encoder"]), rtol=0, atol=1e-7)
    assert torch.equal(weights(models["head"]), before)


def test_norms_are_read_before_the_clipping():
    """GradNormCallback sees each optimizer's own gradients as they were."""
    norms = [dl.GradNormCallback(optimizer_key=key) for key in ("encoder", "head")]

    actual, runner = trained(*norms)

    assert runner.epoch_metrics["train"]["gradient_norm_encoder"] > MAX_NORM
    torch.testing.assert_close(actual, by_hand(), rtol=0, atol=1e-7)


def in_processes():
    """Train under DDP and FSDP2, with and without accumulation, in processes that exist."""
    engines = {
        "ddp": dl.DistributedDataParallelEngine(2, device="cpu", timeout_s=60),
        "fsdp": dl.FullyShardedDataParallelEngine(2, device="cpu", timeout_s=60),
    }
    return {
        (name, accumulate): trained(engine=engine, batch_size=BATCH_SIZE // 2, accumulation_steps=accumulate)[0]
        for name, engine in engines.items()
        for accumulate in (1, 3)
    }


@pytest.mark.slow
def test_in_two_processes_it_is_the_norm_of_the_global_step():
    """Under DDP and FSDP2, whose norm covers the shards of both models."""
    found = together(in_processes)

    for (name, accumulate), actual in found.items():
        assert (actual - by_hand(accumulate=accumulate)).abs().max() < 1e-6, (name, accumulate)


@pytest.mark.horovod
def test_under_horovod_all_gradients_are_exchanged_first():
    """The reference is the hand-written loop on the global batch."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")

    actual, _ = trained(engine=dl.HorovodEngine(2, device="cpu"), batch_size=BATCH_SIZE // 2)

    torch.testing.assert_close(actual, by_hand(), rtol=0, atol=1e-6)
