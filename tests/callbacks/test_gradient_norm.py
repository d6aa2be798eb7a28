"""Logged norms equal a hand-written loop's: unscaled, averaged, before clipping, on any number of processes."""

from functools import partial

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.engines.on_cpu import ddp, fsdp
from tests.tiny import loader, mlp, sgd, train, weights

NUM_SAMPLES = 24


class Seen(dl.Callback):
    """A callback that records the norms of each batch."""

    def __init__(self):
        super().__init__()
        self.norms = []

    def on_batch_end(self, runner):
        norms = {key: each for key, each in runner.batch_metrics.items() if key.startswith("gradient_norm")}
        assert all(isinstance(each, torch.Tensor) for each in norms.values()), "numbers would wait for the device"
        if norms:
            self.norms.append({key: each.item() for key, each in norms.items()})


def norms_of(*callbacks, model=None, batch_size=4, **options):
    seen = Seen()
    callbacks = [dl.GradNormCallback(per_parameter=True), seen, *callbacks]
    runner = train(model, loaders={"train": loader(NUM_SAMPLES, batch_size)}, callbacks=callbacks, **options)
    return seen.norms, runner


def by_hand(*, accumulate=1, max_norm=None, precision=None):
    """Return the norms of each step and the final weights of a hand-written loop."""
    model, norms = mlp(), []
    optimizer, precision = sgd(model), precision or dl.FP32()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=isinstance(precision, dl.AMP))
    model.train()
    for index, (features, targets) in enumerate(loader(NUM_SAMPLES, 4)):
        with torch.autocast("cpu", dtype=torch.float16, enabled=isinstance(precision, dl.AMP)):
            loss = nn.functional.cross_entropy(model(features), targets) / accumulate
        scaler.scale(loss).backward()
        if (index + 1) % accumulate:
            continue
        scaler.unscale_(optimizer)
        gradients = {f"gradient_norm/{name}": each.grad for name, each in model.named_parameters()}
        total = sum(each.square().sum() for each in gradients.values()).sqrt()
        norms.append({"gradient_norm": total.item(), **{key: each.norm().item() for key, each in gradients.items()}})
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms, weights(model)


def assert_same(ours, theirs, *, rel=1e-5):
    assert len(ours) == len(theirs) > 2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=rel)


CLIP = {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": 0.1}}


@pytest.mark.parametrize(
    ("accumulate", "max_norm", "callbacks"),
    [
        (1, None, []),
        (1, 0.1, [dl.OptimizerCallback("loss", **CLIP)]),
        (1, 0.1, [dl.BackwardCallback("loss", **CLIP)]),
        (2, None, [dl.OptimizerCallback("loss", accumulation_steps=2)]),
        (2, 0.1, [dl.OptimizerCallback("loss", accumulation_steps=2, **CLIP)]),
    ],
)
def test_norms_and_weights_are_those_by_hand(accumulate, max_norm, callbacks):
    """The total and each parameter's norm match in each step, up to rounding."""
    theirs, expected = by_hand(accumulate=accumulate, max_norm=max_norm)

    ours, runner = norms_of(*callbacks)

    assert_same(ours, theirs)
    torch.testing.assert_close(weights(runner.model), expected, rtol=0, atol=1e-6)
    mean = sum(each["gradient_norm"] for each in theirs) / len(theirs)
    assert runner.epoch_metrics["train"]["gradient_norm"] == pytest.approx(mean, rel=1e-5)


def test_norms_under_a_scaler_are_unscaled():
    """float16 gradients are 1024 times the true ones, yet norms equal those of a hand-written loop."""
    precision = dl.AMP(torch.float16, scaler={"init_scale": 2.0**10})
    theirs, _ = by_hand(precision=precision)

    ours, _ = norms_of(engine=dl.CPUEngine(precision=precision))

    assert_same(ours, theirs, rel=1e-3)


@pytest.mark.parametrize("engine", [ddp, partial(fsdp, shard_modules=[nn.Linear])], ids=["ddp", "fsdp"])
def test_norms_of_two_processes_are_those_of_one(engine):
    """Norms are those of gradients averaged over both; accumulated ones are reduced with a step's last batch. Those of
    sharded gradients are those of whole ones, also each parameter's."""
    theirs, _ = by_hand(accumulate=2)

    ours, _ = norms_of(dl.OptimizerCallback("loss", accumulation_steps=2), engine=engine(), batch_size=2)

    assert_same(ours, theirs)


def test_only_the_total_is_logged_unless_asked():
    """With several optimizers, the metric's name contains the optimizer's key."""
    model = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})

    class Two(dl.Runner):
        def handle_batch(self, batch):
            features, targets = batch
            for key in ("a", "b"):
                loss = nn.functional.cross_entropy(self.model[key](features), targets)
                self.batch_metrics[f"loss_{key}"] = loss

    seen, callbacks = Seen(), [dl.GradNormCallback(optimizer_key="b")]
    for key in ("a", "b"):
        callbacks += [dl.BackwardCallback(f"loss_{key}"), dl.OptimizerCallback(f"loss_{key}", optimizer_key=key)]

    train(model, runner=Two(), optimizer={key: sgd(model[key]) for key in model}, callbacks=[*callbacks, seen])

    assert [list(each) for each in seen.norms] == [["gradient_norm_b"]] * 4
