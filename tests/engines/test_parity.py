"""Parity beyond the parity law: dropout and batch norm bit for bit, accumulation, and clipping."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, quiet, sgd, train_by_hand, weights

NUM_STEPS, BATCH_SIZE = 20, 8


def supervised(model, optimizer, batches, **kwargs):
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        loaders={"train": batches},
        **quiet(),
        **kwargs,
    )


def test_cpu_engine_is_bit_identical_to_the_hand_written_loop():
    """20 steps with dropout, batch norm and momentum are equal bit for bit."""
    mine, theirs = (mlp(dropout=0.3, batch_norm=True) for _ in range(2))
    batches = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)

    runner = supervised(mine, sgd(mine), batches, engine=dl.CPUEngine())
    losses = train_by_hand(theirs, sgd(theirs), batches)

    assert torch.equal(weights(mine), weights(theirs))
    assert runner.batch_step == NUM_STEPS
    assert runner.epoch_metrics["train"]["loss"] == pytest.approx(torch.stack(losses).double().mean().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_amp_is_bit_identical_to_the_hand_written_autocast_loop(dtype):
    """Casts, scaling and skipped steps are the same."""
    mine, theirs = mlp(), mlp()
    batches = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)

    supervised(mine, sgd(mine), batches, engine=dl.AMPEngine("cpu", dtype=dtype))
    train_by_hand(
        theirs,
        sgd(theirs),
        batches,
        autocast=lambda: torch.autocast("cpu", dtype=dtype),
        scaler=torch.amp.GradScaler("cpu") if dtype == torch.float16 else None,
    )

    assert torch.equal(weights(mine), weights(theirs))


def test_amp_stays_near_full_precision():
    """bf16 keeps 8 bits: errors of 20 momentum steps with lr 0.1 add up to less than 0.05 in weights of about 1."""
    full, mixed = mlp(), mlp()
    batches = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)

    supervised(full, sgd(full), batches, cpu=True)
    supervised(mixed, sgd(mixed), batches, cpu=True, amp=True)

    difference = (weights(full) - weights(mixed)).abs().max()
    assert 0 < difference < 0.05


@pytest.mark.parametrize("engine", [dl.CPUEngine(), dl.DistributedDataParallelEngine(2)])
def test_accumulated_small_batches_equal_one_big_batch(engine):
    """k batches of n samples equal one step on k * n, also if processes defer communication."""
    mine, theirs = mlp(), mlp()
    k = 4
    num_samples = 5 * k * BATCH_SIZE * (2 if engine.is_ddp else 1)

    supervised(
        mine,
        sgd(mine),
        loader(num_samples, BATCH_SIZE),
        engine=engine,
        callbacks=[dl.OptimizerCallback("loss", accumulation_steps=k)],
    )
    train_by_hand(theirs, sgd(theirs), loader(num_samples, num_samples // 5))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)


def test_clipping_acts_on_true_gradients_under_a_scaler():
    """Gradients are unscaled once before clipping, as in the hand-written loop."""
    mine, theirs = mlp(), mlp()
    batches = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)
    clip = dl.BackwardCallback("loss", grad_clip_fn="clip_grad_norm_", grad_clip_params={"max_norm": 0.1})

    supervised(mine, sgd(mine), batches, engine=dl.AMPEngine("cpu", dtype=torch.float16), callbacks=[clip])
    train_by_hand(
        theirs,
        sgd(theirs),
        batches,
        autocast=lambda: torch.autocast("cpu", dtype=torch.float16),
        scaler=torch.amp.GradScaler("cpu"),
        max_norm=0.1,
    )

    assert torch.equal(weights(mine), weights(theirs))
