"""Lookahead on several processes, sharded, and under Apex makes the steps of the paper."""

import pytest
import torch

from runnerkit import dl
from runnerkit.contrib import Lookahead
from tests.contrib.test_lookahead import ALPHA, MAKE, K, by_hand
from tests.engines.together import together
from tests.fake_apex.use import stand_in
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, train, weights

NUM_STEPS = 50
ENGINES = {
    "ddp": lambda: dl.DistributedDataParallelEngine(2, device="cpu", timeout_s=60),
    "fsdp": lambda: dl.FullyShardedDataParallelEngine(2, device="cpu", timeout_s=60),
}


def fit(model, optimizer, engine, *, batch_size=4, **options):
    loaders = {"train": loader(NUM_STEPS * 8, batch_size)}
    return train(model, optimizer=optimizer, engine=engine, loaders=loaders, **options)


def adamw(model):
    return Lookahead(MAKE["adamw"](model.parameters()), K, ALPHA)


def slow_weights(model, optimizer):
    return [optimizer.state[weight]["slow_param"].detach() for weight in model.parameters()]


def resume(folder):
    """Train sharded, interrupt between two synchronizations, and resume."""
    for interrupts in (True, False):
        model = mlp()
        optimizer = adamw(model)
        checkpoint = dl.CheckpointCallback(folder, content="runner", every_steps=21)
        callbacks = {"save": checkpoint, **({"stop": Interrupt(23)} if interrupts else {})}
        try:
            fit(model, optimizer, ENGINES["fsdp"](), logdir=folder, resume="auto", callbacks=callbacks)
        except KeyboardInterrupt:
            assert interrupts
    return weights(model), slow_weights(model, optimizer)


def train_on_each(folder):
    found = {}
    for name, make in ENGINES.items():
        model = mlp()
        optimizer = adamw(model)
        fit(model, optimizer, make())
        found[name] = weights(model), slow_weights(model, optimizer)
    return found, resume(folder)


def test_two_processes_step_as_the_paper_does_on_the_joined_batch(tmp_path):
    """Fast and slow weights agree to 1e-6 (float sums); a resumed sharded run agrees bit for bit."""
    theirs = mlp()

    found, resumed = together(lambda: train_on_each(tmp_path))
    slow = by_hand(theirs, MAKE["adamw"](theirs.parameters()), loader(NUM_STEPS * 8, 8))

    for mine, mine_slow in found.values():
        torch.testing.assert_close(mine, weights(theirs), rtol=0, atol=1e-6)
        torch.testing.assert_close(mine_slow, slow, rtol=0, atol=1e-6)
    assert torch.equal(resumed[0], found["fsdp"][0])
    assert all(map(torch.equal, resumed[1], found["fsdp"][1]))


@pytest.mark.parametrize("opt_level", ["O0", "O1"])
def test_under_apex_it_steps_as_the_paper_does(monkeypatch, opt_level):
    """Apex replaces an optimizer's step(), here Lookahead's."""
    mine, theirs = mlp(), mlp()

    with stand_in(monkeypatch):
        fit(mine, adamw(mine), dl.APEXEngine("cpu", opt_level=opt_level), batch_size=8)
    by_hand(theirs, MAKE["adamw"](theirs.parameters()), loader(NUM_STEPS * 8, 8))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)


def test_under_apex_o2_the_slow_weights_follow_the_masters(monkeypatch):
    """Slow weights are float32 and returned so; weights of step 50, the last, are ahead of those of step 48."""
    model = mlp()
    optimizer = adamw(model)

    with stand_in(monkeypatch):
        fit(model, optimizer, dl.APEXEngine("cpu", opt_level="O2"), batch_size=8)

    assert {each.dtype for each in slow_weights(model, optimizer)} == {torch.float32}
    pairs = zip(slow_weights(model, optimizer), model.parameters(), strict=True)
    distances = [(slow - weight).abs().max() for slow, weight in pairs]
    assert 0 < max(distances) < 0.2
    assert all(not torch.equal(slow, slow.half().float()) for slow in slow_weights(model, optimizer))
