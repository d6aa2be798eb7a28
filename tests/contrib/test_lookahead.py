"""Lookahead follows its paper's algorithm around any optimizer, and keeps all state."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.contrib import Lookahead
from tests.interrupt import Interrupt
from tests.tiny import classification, loader, mlp, train, train_by_hand, weights

NUM_STEPS, K, ALPHA = 50, 4, 0.3  # 50 is not a multiple of 4, so fast and slow weights differ at the end
MAKE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
}


def lookahead(model, *, make=MAKE["sgd"], alpha=ALPHA):
    return Lookahead(make(model.parameters()), K, alpha)


def meet(slow, model, *, alpha=ALPHA):
    """Move the slow weights toward the fast ones, which become equal to them."""
    with torch.no_grad():
        for mine, weight in zip(slow, model.parameters(), strict=True):
            weight.copy_(mine.add_(alpha * (weight - mine)))


def by_hand(model, optimizer, batches, *, after_step=lambda step: None):
    """Run algorithm 1 of the paper in plain PyTorch; return the slow weights."""
    slow = [weight.detach().clone() for weight in model.parameters()]
    for step, batch in enumerate(batches, start=1):
        train_by_hand(model, optimizer, [batch])
        after_step(step)
        if step % K == 0:
            meet(slow, model)
    return slow


def fit(model, optimizer, **options):
    return train(model, optimizer=optimizer, **{"loaders": {"train": loader(NUM_STEPS * 4, 4)}, **options})


@pytest.mark.parametrize("name", MAKE)
def test_fifty_steps_are_those_of_the_paper(name):
    """Fast and slow weights agree to 1e-6: torch.lerp and the hand-written sum round differently."""
    mine, theirs = mlp(), mlp()
    optimizer = lookahead(mine, make=MAKE[name])

    fit(mine, optimizer)
    slow = by_hand(theirs, MAKE[name](theirs.parameters()), loader(NUM_STEPS * 4, 4))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    ours = [optimizer.state[weight]["slow_param"] for weight in mine.parameters()]
    torch.testing.assert_close(ours, slow, rtol=0, atol=1e-6)
    assert not torch.allclose(torch.cat([each.flatten() for each in slow]), weights(theirs).float(), atol=1e-3)


def test_all_the_way_to_the_fast_weights_is_the_optimizer_alone():
    """With alpha=1, the slow weights equal the optimizer's."""
    mine, theirs = mlp(), mlp()

    fit(mine, lookahead(mine, alpha=1.0))
    train_by_hand(theirs, MAKE["sgd"](theirs.parameters()), loader(NUM_STEPS * 4, 4))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("of_inner", [True, False])
def test_a_scheduler_of_either_acts_on_both(of_inner):
    """The parameter groups stay shared after loading a state, which makes new ones."""
    mine, theirs = mlp(), mlp()
    optimizer, reference = lookahead(mine), MAKE["sgd"](theirs.parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer if of_inner else optimizer, 7, gamma=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(reference, 7, gamma=0.5)

    runner = fit(mine, optimizer, scheduler=scheduler, callbacks=[dl.SchedulerCallback(interval="step")])
    by_hand(theirs, reference, loader(NUM_STEPS * 4, 4), after_step=lambda step: schedule.step())

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert runner.epoch_metrics["train"]["lr"] == schedule.get_last_lr()[0] == 0.1 * 0.5**7
    assert optimizer.param_groups is optimizer.optimizer.param_groups


def test_a_step_that_the_scaler_skips_does_not_count():
    """The scaler's first float16 scales overflow; the cycle starts with the first step that is made."""
    mine, theirs = mlp(), mlp()
    optimizer = lookahead(mine)
    precision = dl.AMP(torch.float16, scaler={"init_scale": 2.0**40})

    runner = fit(mine, optimizer, engine=dl.CPUEngine(precision=precision))
    skipped = int(runner.epoch_metrics["train"]["skipped_steps"])
    reference, scaler = MAKE["sgd"](theirs.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    num_done, slow = 0, [weight.detach().clone() for weight in theirs.parameters()]
    hook = reference.register_step_post_hook(lambda *_: done.append(True))
    done = []
    for batch in loader(NUM_STEPS * 4, 4):
        train_by_hand(theirs, reference, [batch], scaler=scaler, autocast=partial(torch.autocast, "cpu", torch.float16))
        if len(done) > num_done and len(done) % K == 0:
            meet(slow, theirs)
        num_done = len(done)
    hook.remove()

    assert 0 < skipped == NUM_STEPS - num_done
    assert optimizer.param_groups[0]["lookahead_step"] == num_done % K
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)


def test_a_fused_optimizer_that_would_unscale_by_itself_is_unscaled_for():
    """The scaler reads the attribute from the object it gets, and Lookahead does not define it."""
    model = mlp()
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), fused=True))

    assert getattr(optimizer.optimizer, "_step_supports_amp_scaling", False)
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def resumable(logdir, *, interrupt):
    model = mlp(dropout=0.3)
    optimizer = lookahead(model, make=MAKE["adamw"])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    scheduler = dl.WarmupLR(optimizer, num_steps=25, after=plateau)
    loaders = {"train": loader(40, 4, shuffle=True), "valid": loader(20, 4, seed=1)}
    callbacks = [
        dl.CheckpointCallback(logdir, content="runner", every_steps=3),
        *([Interrupt(23)] if interrupt else []),
    ]
    options = {"callbacks": callbacks, "num_epochs": 5, "logdir": logdir, "resume": "auto"}
    fit(model, optimizer, scheduler=scheduler, loaders=loaders, **options)
    return model, optimizer


def test_a_run_killed_between_two_meetings_goes_on_bit_for_bit(tmp_path):
    """Interrupted within a warm-up before a plateau, weights, slow weights, momenta, rates and counts are equal."""
    whole, expected = resumable(tmp_path / "whole", interrupt=False)
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path / "killed", interrupt=True)
    saved = load_checkpoint(tmp_path / "killed" / "checkpoints" / "last.pth")

    model, optimizer = resumable(tmp_path / "killed", interrupt=False)

    (group,) = saved["optimizer_state_dict"][""]["param_groups"]
    assert group["lookahead_step"] == 1 and group["lr"] == pytest.approx(0.02 * 21 / 25)  # the checkpoint of step 21
    assert torch.equal(weights(model), weights(whole))
    mine, theirs = optimizer.state_dict(), expected.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["param_groups"][0]["lr"] < 0.02
    assert set(mine["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "slow_param"}
    for key, state in mine["state"].items():
        assert all(torch.equal(value, theirs["state"][key][name]) for name, value in state.items())


@pytest.mark.parametrize(
    "travel", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_alike_and_apart(travel):
    """Spawned processes receive the optimizer by pickle."""
    model = mlp()
    optimizer = lookahead(model, make=MAKE["adamw"])
    batches = list(loader(40, 4))
    train_by_hand(model, optimizer, batches[:3])

    model_too, optimizer_too = travel((model, optimizer))
    train_by_hand(model, optimizer, batches[3:])
    before = weights(model_too)
    train_by_hand(model_too, optimizer_too, batches[3:])

    assert torch.equal(weights(model), weights(model_too)) and not torch.equal(before, weights(model))
    assert optimizer_too.optimizer.state is optimizer_too.state


def test_weights_that_are_unfrozen_later_are_ahead_of_what_they_were_then():
    """Adam initializes a weight's state in its first step, and must find it empty."""
    mine, theirs = mlp(), mlp()
    optimizer, reference = lookahead(mine, make=MAKE["adamw"]), MAKE["adamw"](theirs.parameters())
    batches = list(loader(NUM_STEPS * 4, 4))
    for model in (mine, theirs):
        model[0].requires_grad_(False)

    train_by_hand(mine, optimizer, batches[: 2 * K])
    by_hand(theirs, reference, batches[: 2 * K])
    for model in (mine, theirs):
        model[0].requires_grad_(True)
    train_by_hand(mine, optimizer, batches[2 * K :])
    by_hand(theirs, reference, batches[2 * K :])

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)


def test_a_group_that_is_added_meets_its_slow_weights_too():
    """It synchronizes every k steps from when it was added, to Lookahead or to the inner optimizer."""
    mine, theirs = mlp(), mlp()
    optimizer = Lookahead(MAKE["sgd"](mine[0].parameters()), K, ALPHA)
    reference = MAKE["sgd"](theirs[0].parameters())
    batches = list(loader(NUM_STEPS * 4, 4))

    train_by_hand(mine, optimizer, batches[:K])
    optimizer.add_param_group({"params": list(mine[3].parameters()), "lr": 0.05})
    train_by_hand(mine, optimizer, batches[K:])

    def add_group(step):
        if step == K:
            reference.add_param_group({"params": list(theirs[3].parameters()), "lr": 0.05})

    by_hand(theirs, reference, batches, after_step=add_group)

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert [group["lookahead_step"] for group in optimizer.param_groups] == [NUM_STEPS % K] * 2
    added = nn.Parameter(torch.ones(2))
    optimizer.optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.param_groups[2]["lookahead_step"] == 1 and "slow_param" in optimizer.state[added]


def test_a_closure_is_handed_on():
    """LBFGS evaluates it several times per step; the slow weights start from those before the first time."""
    mine, theirs = mlp(), mlp()
    features, targets = classification(40).tensors

    def closure_of(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), targets)
            loss.backward()
            return loss

        return closure

    optimizer = Lookahead(torch.optim.LBFGS(mine.parameters(), lr=0.1, max_iter=3), k=2, alpha=ALPHA)
    losses = [optimizer.step(closure_of(mine, optimizer)) for _ in range(6)]
    reference = torch.optim.LBFGS(theirs.parameters(), lr=0.1, max_iter=3)
    slow, expected = [weight.detach().clone() for weight in theirs.parameters()], []
    for step in range(1, 7):
        expected.append(reference.step(closure_of(theirs, reference)))
        if step % 2 == 0:
            meet(slow, theirs)

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    torch.testing.assert_close(losses, expected)


def test_a_checkpoint_from_before_lookahead_begins_it():
    """The weights at that time become the slow ones; in the other direction, the inner optimizer loads the state."""
    model, alone = mlp(), mlp()
    train_by_hand(alone, plain := MAKE["sgd"](alone.parameters()), loader(12, 4))
    model.load_state_dict(alone.state_dict())
    optimizer = lookahead(model)

    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # otherwise the optimizers would share their momenta
    train_by_hand(model, optimizer, loader(NUM_STEPS * 4, 4))
    by_hand(alone, plain, loader(NUM_STEPS * 4, 4))

    torch.testing.assert_close(weights(model), weights(alone), rtol=0, atol=1e-6)
    MAKE["sgd"](model.parameters()).load_state_dict(optimizer.state_dict())


SGD = MAKE["sgd"](mlp().parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SGD, 0), ValueError, "k must be an integer >= 1, got 0"),
        ((SGD, 2.5), ValueError, "k must be an integer >= 1, got 2.5"),
        ((SGD, 5, 0.0), ValueError, r"alpha must be in \(0, 1\], got 0.0"),
        ((SGD, 5, 1.5), ValueError, r"alpha must be in \(0, 1\], got 1.5"),
        (([],), TypeError, "must wrap a torch optimizer other than Lookahead, got a <class 'list'>"),
        ((Lookahead(SGD),), TypeError, "other than Lookahead"),  # both would keep slow weights in one place
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    """The error says what was expected."""
    with pytest.raises(error, match=message):
        Lookahead(*arguments)


def test_schedulers_find_that_the_optimizer_steps():
    """torch does not warn that the scheduler stepped before the optimizer."""
    model = mlp()
    optimizer = lookahead(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_by_hand(model, optimizer, loader(4, 4))
        scheduler.step()

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
