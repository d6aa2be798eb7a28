"""HorovodAPEXEngine: Horovod itself, and a stand-in for Apex."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.fake_apex.use import stand_in
from tests.tiny import loader, mlp, quiet, sgd, train_by_hand, weights

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
pytestmark = [pytest.mark.slow]


@pytest.fixture
def apex(monkeypatch):
    """The stand-in for the package, in this process and those that it starts."""
    with stand_in(monkeypatch) as package:
        yield package


def train(model, batches, engine, *callbacks):
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={"train": batches},
        engine=engine,
        callbacks=callbacks,
        **quiet(),
    )


@pytest.mark.parametrize(("opt_level", "tolerance"), [("O1", 1e-6), ("O2", 1e-3)])
@pytest.mark.parametrize("k", [1, 3])
def test_two_processes_equal_one_on_the_joined_batch(apex, opt_level, tolerance, k):
    """Also when gradients accumulate: to the order of sums in fp32, and to fp16's 11 bits under O2."""
    mine, theirs = mlp(), mlp()
    num_samples = 5 * k * 8 * 2

    train(
        mine,
        loader(num_samples, 8),
        dl.HorovodAPEXEngine(2, device="cpu", opt_level=opt_level),
        dl.OptimizerCallback("loss", accumulation_steps=k),
    )
    train_by_hand(theirs, sgd(theirs), loader(num_samples, num_samples // 5))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=tolerance)


class OverflowOnRankOne(dl.Callback):
    """In the second batch; notes the largest difference of weights between ranks at the end."""

    def on_batch_start(self, runner):
        if runner.batch_step == 2 and runner.engine.rank == 1:
            runner.batch[0].mul_(1e35)

    def on_stage_end(self, runner):
        everybodys = runner.engine.gather_object(weights(runner.engine.unwrap(runner.model)))
        self.difference = (everybodys[0] - everybodys[1]).abs().max().item()


def test_an_overflow_of_one_process_skips_the_step_of_all(apex):
    """Gradients are averaged before Apex looks at them, so that ranks neither part ways nor wait for one another."""
    model, overflow = mlp(), OverflowOnRankOne()

    runner = train(model, loader(64, 8), dl.HorovodAPEXEngine(2, device="cpu"), overflow)

    assert runner.epoch_metrics["train"]["skipped_steps"] == 1
    assert overflow.difference == 0


def test_an_operation_that_unscaling_would_spoil_is_refused():
    """By the constructor."""
    with pytest.raises(ValueError, match="op must be 'average' with Apex"):
        dl.HorovodAPEXEngine(op="adasum")
