"""Tests of WarmupLR: a linear warm-up, followed by any scheduler."""

import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from runnerkit import dl
from runnerkit.contrib import Lookahead
from tests.interrupt import at
from tests.tiny import classification, loader, mlp, sgd, train, weights

BATCHES, EPOCHS, LR = 5, 10, 0.2  # 50 steps


def noted_rates():
    """Return a callback, and the list to which it adds the learning rate of each step."""
    rates = []

    def note(runner):
        if runner.is_train_loader:
            rates.append(runner.optimizer.param_groups[0]["lr"])

    return at("on_batch_end", note, order=dl.CallbackOrder.Internal), rates


def rates_of(make, *, model=None, callbacks=(), **options):
    model, (note, rates) = model or mlp(), noted_rates()
    optimizer = options.pop("optimizer", None) or sgd(model, lr=LR)
    options = {"loaders": {"train": loader(BATCHES * 4, 4)}, "num_epochs": EPOCHS, **options}
    runner = train(model, optimizer=optimizer, scheduler=make(optimizer), callbacks=[note, *callbacks], **options)
    return rates, runner


def line(length, start, *, full=LR):
    return [start + (full - start) * i / length for i in range(length)]


def each_epoch(rates):
    return [rate for rate in rates for _ in range(BATCHES)]


def cosine(length, num, *, full=LR):
    """Return the first `num` rates of half a cosine to 0."""
    return [full * (1 + math.cos(math.pi * i / length)) / 2 for i in range(num)]


def cosine_of(length):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, length)


# The name, the arguments, the scheduler that follows, its interval, and the rates.
CURVES = {
    "steps, from 0, then steps": ({"num_steps": 8}, cosine_of(42), "step", line(8, 0.0) + cosine(42, 42)),
    "steps, from 0.05, then a constant": ({"num_steps": 8, "start_lr": 0.05}, None, None, line(8, 0.05) + [LR] * 42),
    "epochs, from 0.05, then epochs": (
        *({"num_epochs": 3, "start_lr": 0.05}, cosine_of(7), None),
        each_epoch(line(3, 0.05) + cosine(7, 7)),
    ),
    "epochs, from 0, then steps": (
        *({"num_epochs": 2}, cosine_of(40), "step"),
        each_epoch(line(2, 0.0)) + cosine(40, 40),
    ),
    # The warm-up ends within the second epoch, and the cosine's first step is at its end.
    "steps, from 0, then epochs": (
        *({"num_steps": 8}, cosine_of(9), None),
        line(8, 0.0) + [LR] * 2 + each_epoch(cosine(9, 9)[1:]),
    ),
    "longer than the run": ({"num_steps": 100}, None, None, line(100, 0.0)[:50]),
}


@pytest.mark.parametrize("name", CURVES)
def test_fifty_rates_are_those_of_the_formula(name):
    """Fifty rates equal a formula to 1e-6, since torch computes its cosine recursively."""
    arguments, after, interval, expected = CURVES[name]

    rates, _ = rates_of(
        lambda optimizer: dl.WarmupLR(optimizer, **arguments, after=after(optimizer) if after else None),
        callbacks=[dl.SchedulerCallback(interval=interval)],
    )

    assert rates == pytest.approx((expected + [0.0] * 50)[:50], rel=0, abs=1e-6)


def every_third(num_samples, *, seed):
    """Return data that are only partly learnable, because a third of the labels are wrong."""
    features, targets = classification(num_samples, seed=seed).tensors
    targets[::3] = (targets[::3] + 1) % 3
    return torch.utils.data.TensorDataset(features, targets)


def recipe_loaders():
    data = {"train": every_third(20, seed=0), "valid": every_third(20, seed=1)}
    return {key: torch.utils.data.DataLoader(each, batch_size=4) for key, each in data.items()}


def recipe_by_hand(model, *, warmup, k, alpha, drop_patience, stop_patience, num_epochs):
    """Train in a hand-written loop with warm-up by steps, ReduceLROnPlateau, Lookahead and early stopping."""
    optimizer = sgd(model, lr=LR)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=drop_patience)
    slow = [weight.detach().clone() for weight in model.parameters()]
    rates, drops, step, best, bad = [], [], 0, math.inf, 0
    loaders = recipe_loaders()
    for epoch in range(1, num_epochs + 1):
        model.train()
        for features, targets in loaders["train"]:
            if step <= warmup:
                optimizer.param_groups[0]["lr"] = LR * step / warmup
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), targets).backward()
            optimizer.step()
            step += 1
            if step % k == 0:
                for each, weight in zip(slow, model.parameters(), strict=True):
                    weight.data.copy_(each.add_(alpha * (weight.data - each)))
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.cross_entropy(model(x), y).item() * len(y) for x, y in loaders["valid"]]
        loss = sum(losses) / 20
        if step >= warmup:
            before = optimizer.param_groups[0]["lr"]
            plateau.step(loss)
            drops += [epoch] if optimizer.param_groups[0]["lr"] < before else []
        best, bad = (loss, 0) if loss < best - 1e-6 else (best, bad + 1)
        if bad >= stop_patience:
            break
    return rates, drops, epoch


def test_the_whole_recipe_is_that_of_the_guides():
    """Rates, weights, rate drops and the early stop equal a hand-written loop to 1e-6 over more than 50 steps."""
    mine, theirs = mlp(), mlp()
    arguments = {"warmup": 12, "k": 3, "alpha": 0.5, "drop_patience": 1, "stop_patience": 9, "num_epochs": 40}
    optimizer = Lookahead(sgd(mine, lr=LR), k=3, alpha=0.5)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    stop = [dl.EarlyStoppingCallback(9, monitor="valid/loss", mode="min")]
    options = {"model": mine, "optimizer": optimizer, "loaders": recipe_loaders(), "num_epochs": 40}

    used, runner = rates_of(lambda each: dl.WarmupLR(each, num_steps=12, after=plateau), callbacks=stop, **options)
    rates, drops, last_epoch = recipe_by_hand(theirs, **arguments)

    assert used == pytest.approx(rates, rel=0, abs=1e-6) and len(rates) > 50
    logged = {epoch: metrics["train"]["lr"] for epoch, metrics in runner.experiment_metrics.items()}
    ours = [epoch - 1 for epoch in logged if epoch > 1 and logged[epoch] < logged[epoch - 1]]
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert (ours, runner.epoch_step) == (drops, last_epoch)
    assert len(drops) >= 2 and 10 < last_epoch < 40


def test_accumulated_batches_and_skipped_steps_do_not_warm_up():
    """The warm-up counts optimizer steps, not accumulated batches or skipped steps."""
    accumulated, _ = rates_of(
        lambda optimizer: dl.WarmupLR(optimizer, num_steps=10), accumulation_steps=2, num_epochs=2
    )
    scaler = {"init_scale": 2.0**40}  # overflows and is halved until it fits
    engine = dl.CPUEngine(precision=dl.AMP(torch.float16, scaler=scaler))
    skipping, runner = rates_of(lambda optimizer: dl.WarmupLR(optimizer, num_steps=100), engine=engine)
    num_skipped = sum(int(each["train"]["skipped_steps"]) for each in runner.experiment_metrics.values())

    # An epoch of five batches has two pairs and a single batch.
    assert accumulated == pytest.approx([LR * i / 10 for i in (0, 0, 1, 1, 2, 3, 3, 4, 4, 5)])
    assert num_skipped > 0
    assert runner.scheduler.num_done == 50 - num_skipped
    assert skipping[num_skipped + 1] == pytest.approx(LR / 100)


def test_the_scale_of_several_processes_multiplies_it():
    """LRScaleCallback multiplies the rate of each warm-up step."""
    used, model, scale = [], mlp(), dl.LRScaleCallback("linear")
    scale.factor = lambda *, world_size, step: 4.0

    class Note(torch.optim.SGD):
        def step(self, closure=None):
            used.append(self.param_groups[0]["lr"])
            return super().step(closure)

    options = {"model": model, "optimizer": Note(model.parameters(), lr=LR), "loaders": {"train": loader(24, 4)}}
    rates_of(lambda each: dl.WarmupLR(each, num_steps=4), callbacks=[scale], num_epochs=1, **options)

    assert used == pytest.approx([4 * rate for rate in [*line(4, 0.0), LR, LR]])


def in_sequence(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3), lr_scheduler.StepLR(optimizer, 1)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler([lr_scheduler.MultiStepLR(optimizer, [each]) for each in (4, 5)])


def warm(optimizer):
    return dl.WarmupLR(optimizer, num_steps=3, after=lr_scheduler.StepLR(optimizer, 1))


@pytest.mark.parametrize("make", [warm, in_sequence, chained])
def test_schedulers_within_a_scheduler_act_on_what_the_engine_made_of_the_optimizer(make):
    """Inner schedulers follow an engine that replaces the optimizer, as Horovod does, and get the original back."""

    class Wrapping(dl.CPUEngine):
        def prepare(self, models, optimizers):
            models, optimizers = super().prepare(models, optimizers)
            self.bare = optimizers
            return models, {key: pickled_apart(each) for key, each in optimizers.items()}

        def release(self, models, optimizers):
            return super().release(models, self.bare)

    def pickled_apart(each):
        another = torch.optim.SGD([parameter for group in each.param_groups for parameter in group["params"]], lr=9.0)
        another.load_state_dict(each.state_dict())
        return another

    options = {"engine": Wrapping(), "loaders": {"train": loader(24, 4)}, "num_epochs": 1}
    rates, runner = rates_of(make, callbacks=[dl.SchedulerCallback(interval="step")], **options)

    assert rates[3:] == pytest.approx([LR, LR / 10, LR / 100])
    assert runner.scheduler.optimizer is runner.optimizer and type(runner.optimizer) is torch.optim.SGD
    assert runner.optimizer.param_groups[0]["lr"] != 9.0


@pytest.mark.parametrize("travels_by", [None, "pickle", "state"])
def test_state_and_pickle_go_on_where_they_were(travels_by):
    """A restored or unpickled WarmupLR, with the scheduler after it, continues with the same rates."""

    def make():
        optimizer = sgd(mlp(), lr=LR)
        return dl.WarmupLR(optimizer, num_steps=3, after=lr_scheduler.StepLR(optimizer, 2))

    scheduler, rates = make(), []
    for step in range(9):
        if step == 5 and travels_by == "pickle":
            scheduler = pickle.loads(pickle.dumps(scheduler))
        elif step == 5 and travels_by == "state":
            saved, scheduler = scheduler, make()
            scheduler.optimizer.load_state_dict(saved.optimizer.state_dict())
            scheduler.load_state_dict(saved.state_dict())
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])

    assert rates == pytest.approx([LR / 3, LR * 2 / 3, LR, LR, LR / 10, LR / 10, LR / 100, LR / 100, LR / 1000])


@pytest.mark.parametrize("length", [4, 8, 16])
def test_a_warm_up_of_another_length_goes_on_from_the_same_share(length):
    """With another length, a restored warm-up continues from the same fraction and reaches the full rate."""
    optimizer = sgd(mlp(), lr=0.4)
    before = dl.WarmupLR(optimizer, num_steps=8)
    for _ in range(4):
        before.step()
    state = before.state_dict()

    after = dl.WarmupLR(sgd(mlp(), lr=0.4), num_steps=length)
    after.load_state_dict(state)
    rates = []
    for _ in range(length // 2):
        after.step()
        rates += after.get_last_lr()

    assert after.is_over
    assert rates == pytest.approx([0.2 + 0.4 * step / length for step in range(1, length // 2 + 1)])


def test_each_group_reaches_its_own_rate():
    """Each parameter group reaches its own rate; a group added during the warm-up keeps its full rate."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": torch.tensor(0.3)}]
    optimizer = torch.optim.SGD(groups)
    scheduler = dl.WarmupLR(optimizer, num_steps=2, start_lr=0.1)

    scheduler.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.7})
    halfway = scheduler.get_last_lr()
    scheduler.step()
    scheduler.step()  # no scheduler follows

    assert halfway == pytest.approx([0.1, 0.2, 0.7])
    assert scheduler.get_last_lr() == pytest.approx([0.1, 0.3, 0.7])
    assert isinstance(optimizer.param_groups[1]["lr"], torch.Tensor)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "either num_steps or num_epochs, an int >= 1, got num_steps=None, num_epochs=None"),
        ({"num_steps": 1, "num_epochs": 1}, ValueError, "either num_steps or num_epochs, an int >= 1, got"),
        ({"num_steps": 0}, ValueError, "got num_steps=0"),
        ({"num_steps": 2.5}, ValueError, "an int >= 1, got num_steps=2.5"),
        ({"num_epochs": 2.0}, ValueError, "an int >= 1, got num_steps=None, num_epochs=2.0"),
        ({"num_steps": 2, "start_lr": -0.1}, ValueError, r"between 0 and the learning rates, \[0.2\]; got -0.1"),
        ({"num_steps": 2, "start_lr": 0.3}, ValueError, r"between 0 and the learning rates, \[0.2\]; got 0.3"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    """Invalid arguments raise an error with the expected and the given value."""
    with pytest.raises(error, match=message):
        dl.WarmupLR(sgd(mlp(), lr=LR), **arguments)


def test_a_scheduler_that_cannot_follow_is_refused():
    """A scheduler of another optimizer, which would silently change other rates, and a second warm-up are refused."""
    optimizer, another = sgd(mlp()), sgd(mlp())

    with pytest.raises(ValueError, match=r"after=StepLR\(...\) has another optimizer; create it with the same one"):
        dl.WarmupLR(optimizer, num_steps=2, after=lr_scheduler.StepLR(another, 1))
    with pytest.raises(TypeError, match="would warm up twice"):
        dl.WarmupLR(optimizer, num_steps=2, after=dl.WarmupLR(optimizer, num_steps=2))
