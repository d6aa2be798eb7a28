"""Parity beyond the parity law: dropout and batch norm bit for bit, accumulation, and clipping."""

import pytest
import torch

from runnerkit import dl
from tests.tiny import loader, mlp, sgd, train, train_by_hand, weights

NUM_STEPS, BATCH_SIZE = 20, 8


BATCHES = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)


def test_cpu_engine_is_bit_identical_to_the_hand_written_loop():
    """20 steps with dropout, batch norm and momentum are equal bit for bit."""
    mine, theirs = (mlp(dropout=0.3, batch_norm=True) for _ in range(2))

    runner = train(mine, loaders={"train": BATCHES})
    losses = train_by_hand(theirs, sgd(theirs), BATCHES)

    assert torch.equal(weights(mine), weights(theirs))
    assert runner.batch_step == NUM_STEPS
    assert runner.epoch_metrics["train"]["loss"] == pytest.approx(torch.stack(losses).double().mean().item(), rel=1e-12)


@pytest.mark.parametrize(("dtype", "max_norm"), [(torch.bfloat16, None), (torch.float16, None), (torch.float16, 0.1)])
def test_amp_is_bit_identical_to_the_hand_written_autocast_loop(dtype, max_norm):
    """Casts, scaling and skipped steps are the same; gradients are unscaled once before clipping."""
    mine, theirs = mlp(), mlp()
    clip = {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": max_norm}}
    callbacks = [dl.BackwardCallback("loss", **clip)] if max_norm else None
    scaler = torch.amp.GradScaler("cpu") if dtype == torch.float16 else None

    train(mine, loaders={"train": BATCHES}, engine=dl.AMPEngine("cpu", dtype=dtype), callbacks=callbacks)
    amp = {"autocast": lambda: torch.autocast("cpu", dtype=dtype), "scaler": scaler}
    train_by_hand(theirs, sgd(theirs), BATCHES, max_norm=max_norm, **amp)

    assert torch.equal(weights(mine), weights(theirs))


def test_amp_stays_near_full_precision():
    """bf16 keeps 8 bits: errors of 20 momentum steps with lr 0.1 add up to less than 0.05 in weights of about 1."""
    full, mixed = mlp(), mlp()

    train(full, loaders={"train": BATCHES})
    train(mixed, loaders={"train": BATCHES}, amp=True)

    difference = (weights(full) - weights(mixed)).abs().max()
    assert 0 < difference < 0.05


def test_accumulated_small_batches_equal_one_big_batch():
    """k batches of n samples equal one step on k * n; test_gradient_law.py has this for several processes."""
    mine, theirs = mlp(), mlp()
    k = 4
    num_samples = 5 * k * BATCH_SIZE

    step = dl.OptimizerCallback("loss", accumulation_steps=k)
    train(mine, loaders={"train": loader(num_samples, BATCH_SIZE)}, callbacks=[step])
    train_by_hand(theirs, sgd(theirs), loader(num_samples, num_samples // 5))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
