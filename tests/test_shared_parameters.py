"""Parameters that belong to several optimizers: averaged, unscaled and clipped once, as in a hand-written loop."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.types import shared_parameters
from tests.engines.together import together
from tests.fake_apex.use import stand_in
from tests.tiny import classification, train, weights

NUM_SAMPLES, BATCH_SIZE, MAX_NORM, SCALE = 23, 4, 0.2, 2.0**10
KEYS = ("a", "b")


class Shared(nn.Module):
    """An encoder and two heads."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.encoder = nn.Linear(6, 8)
            self.heads = nn.ModuleDict({key: nn.Linear(8, 3) for key in KEYS})

    def forward(self, features):
        hidden = self.encoder(features).tanh()
        return [self.heads[key](hidden) for key in KEYS]


def optimizers_of(model, *, divisor=1):
    """Return an optimizer for each head, with the encoder in both, whose rates are divided."""
    return {
        key: torch.optim.SGD(
            [*model.encoder.parameters(), *model.heads[key].parameters()], lr=lr / divisor, momentum=0.9
        )
        for key, lr in zip(KEYS, (0.2, 0.1), strict=True)
    }


def data(dtype):
    features, targets = classification(NUM_SAMPLES).tensors
    return TensorDataset(features.to(dtype), targets)


def loss_of(model, features, targets):
    """Return the sum of the heads' means over tokens, of which a sample of class c has c + 1."""
    losses = [nn.functional.cross_entropy(each, targets, reduction="none") for each in model(features)]
    tokens = targets + 1
    return ((losses[0] + 0.5 * losses[1]) * tokens).sum() / tokens.sum()


class Whole(dl.Runner):
    """Leaves backward pass and steps to callbacks."""

    by_tokens = True

    def handle_batch(self, batch):
        if self.by_tokens:
            self.batch_weight = (batch[1] + 1).sum()
        self.batch_metrics["loss"] = loss_of(self.model, *batch)


class Learning(Whole):
    steps_itself = True

    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.learn(self.batch_metrics["loss"], optimizer=KEYS)


class Own(Whole):
    """Clips the gradients of all before the steps."""

    steps_itself = True

    def handle_batch(self, batch):
        super().handle_batch(batch)
        for key in KEYS:
            self.engine.zero_grad(self.optimizer[key])
        self.engine.backward(self.batch_metrics["loss"])
        for key in KEYS:
            self.engine.unscale(self.optimizer[key])
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        for key in KEYS:
            self.engine.step(self.optimizer[key])


class InTurns(Whole):
    """A loss for each optimizer, one after the other."""

    steps_itself = True

    def handle_batch(self, batch):
        for key in KEYS:
            self.learn(loss_of(self.model, *batch), optimizer=key)


def fit(
    runner,
    *,
    precision="fp32",
    accumulated=1,
    clip=None,
    num_processes=1,
    model=None,
    callbacks=(),
    make_engine=None,
    divisor=1,
):
    """Return the weights, in float64 if the precision is fp32."""
    dtype = torch.float32 if precision == "fp16" else torch.float64
    model = model or Shared().to(dtype)
    amp = dl.AMP(torch.float16, scaler={"init_scale": SCALE}) if precision == "fp16" else None
    if make_engine is not None:
        engine = make_engine() if amp is None else make_engine(precision=amp)
    elif num_processes > 1:
        engine = dl.DistributedDataParallelEngine(num_processes, device="cpu", precision=amp)
    else:
        engine = dl.CPUEngine(precision=amp)
    each = {"gradient_clip": MAX_NORM} if clip == "each" else {}
    steppers = [dl.OptimizerCallback(optimizer_key=key, accumulation_steps=accumulated, **each) for key in KEYS]
    steps = [] if runner.steps_itself else [dl.BackwardCallback("loss"), *steppers]
    options = {"gradient_clip": MAX_NORM} if clip == "jointly" and not isinstance(runner, Own) else {}
    loaders = {"train": DataLoader(data(dtype), batch_size=BATCH_SIZE // num_processes)}
    options |= {
        "optimizer": optimizers_of(model, divisor=divisor),
        "loaders": loaders,
        "callbacks": [*steps, *callbacks],
    }
    train(model, runner=runner, engine=engine, criterion=None, num_epochs=2, **options)
    return weights(model)


def by_hand(*, precision="fp32", accumulated=1, clip=None, by_tokens=True):
    """Take the same steps: gradients are divided, unscaled and clipped once for each parameter."""
    is_fp16 = precision == "fp16"
    model = Shared().to(torch.float32 if is_fp16 else torch.float64)
    optimizers = optimizers_of(model).values()
    samples, size = data(next(model.parameters()).dtype), BATCH_SIZE * accumulated
    for start in [*range(0, NUM_SAMPLES, size)] * 2:
        model.zero_grad()
        places = range(start, min(start + size, NUM_SAMPLES), BATCH_SIZE)
        batches = [samples[place : min(place + BATCH_SIZE, NUM_SAMPLES)] for place in places]
        shares = [float((y + 1).sum() if by_tokens else len(y)) for _, y in batches]
        for batch, share in zip(batches, shares, strict=True):
            with torch.autocast("cpu", torch.float16) if is_fp16 else nullcontext():
                loss = loss_of(model, *batch)
            (loss * (share / sum(shares) * (SCALE if is_fp16 else 1))).backward()
        for each in model.parameters():
            each.grad /= SCALE if is_fp16 else 1
        if clip == "jointly":
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in optimizers:
            if clip == "each":
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
            optimizer.step()
    return weights(model)


def bound(precision):
    return 2e-3 if precision == "fp16" else 1e-12  # float16 rounds a weighted loss differently


CLIPS = (None, "each", "jointly")


@pytest.mark.parametrize(("precision", "accumulated", "clip"), [*product(("fp32", "fp16"), (1, 3), CLIPS)])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_callbacks_step_as_a_hand_written_loop(precision, accumulated, clip, by_tokens):
    """By samples with a ragged end, or by tokens."""
    runner = Whole()
    runner.by_tokens = by_tokens
    options = {"precision": precision, "accumulated": accumulated, "clip": clip}

    apart = (fit(runner, **options) - by_hand(by_tokens=by_tokens, **options)).abs().max().item()

    assert apart < bound(precision)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("kind", "clip"), [(Learning, None), (Learning, "jointly"), (Own, "jointly")])
def test_own_steps_are_those_of_a_hand_written_loop(kind, clip, precision):
    """By ``learn``, and by the engine's methods after the gradients were read."""
    found = fit(kind(), precision=precision, clip=clip)

    assert (found - by_hand(precision=precision, clip=clip)).abs().max() < bound(precision)


def test_each_backward_pass_is_unscaled_anew():
    """Two steps of a batch, each on a loss of its own."""
    model = Shared()
    optimizers = optimizers_of(model)
    for start in [*range(0, NUM_SAMPLES, BATCH_SIZE)] * 2:
        for optimizer in optimizers.values():
            model.zero_grad()
            batch = data(torch.float32)[start : min(start + BATCH_SIZE, NUM_SAMPLES)]
            loss_of(model, *batch).backward()
            optimizer.step()

    assert (fit(InTurns(), precision="fp16") - weights(model)).abs().max() < bound("fp16")


@pytest.mark.parametrize("engine", ["AMP", "Apex"])
def test_no_optimizer_steps_on_a_shared_gradient_that_overflowed(engine, monkeypatch):
    """Both skip the step, although the other gradients of the second one are finite."""
    model, calls = Shared().to(torch.float32 if engine == "AMP" else torch.float64), []

    def overflow(gradient):
        calls.append(gradient)
        return gradient * float("inf") if len(calls) == 3 else gradient

    model.encoder.weight.register_hook(overflow)
    runner = Whole()
    options = {"precision": "fp16"} if engine == "AMP" else {"make_engine": partial(dl.APEXEngine, "cpu")}
    with stand_in(monkeypatch):
        found = fit(runner, model=model, **options)

    assert torch.isfinite(found).all()
    assert len(calls) == 12
    skipped = [epoch["train"][f"skipped_steps_{key}"] for epoch in runner.experiment_metrics.values() for key in KEYS]
    assert skipped == [1, 1, 0, 0]


def in_two_processes():
    found = {}
    for kind, accumulated, precision in product((Whole, Learning), (1, 3), ("fp32", "fp16")):
        if kind is Whole or accumulated == 1:
            options = {"accumulated": accumulated, "precision": precision}
            found[kind.__name__, accumulated, precision] = fit(kind(), num_processes=2, **options)
    return found


def test_two_processes_step_as_one():
    """Weighted by tokens, whose sum is asked for while the backward pass runs."""
    for (name, accumulated, precision), found in together(in_two_processes).items():
        expected = by_hand(precision=precision, accumulated=accumulated)
        assert (found - expected).abs().max() < bound(precision), (name, accumulated, precision)


HOROVOD = [
    (Whole, {"accumulated": 3}, "average"),
    (Whole, {"accumulated": 3, "precision": "fp16", "clip": "each"}, "average"),
    (Whole, {"accumulated": 3}, "sum"),
    (Learning, {"clip": "jointly"}, "average"),
    (Learning, {}, "sum"),
    (Own, {"clip": "jointly"}, "average"),
]


def in_horovod():
    """Return the weights after each run, and how many gradients it sent."""
    from tests.engines.horovod_cases import sent_gradients

    found = []
    for kind, options, op in HOROVOD:
        make = partial(dl.HorovodEngine, 2, device="cpu", op=op)
        with sent_gradients() as sent:
            # A sum is twice the average.
            weight = fit(kind(), num_processes=2, make_engine=make, divisor=2 if op == "sum" else 1, **options)
        found.append((weight, len(sent)))
    return found


@pytest.mark.horovod
@pytest.mark.slow
def test_horovod_sends_a_gradient_of_two_optimizers_once():
    """With the operation "average" and with "sum"."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")

    results = dl.HorovodEngine(2, device="cpu").launch(in_horovod)

    num_parameters, num_epochs = 6, 2
    for (kind, options, op), (found, num_sent) in zip(HOROVOD, results, strict=True):
        apart = (found - by_hand(**options)).abs().max().item()
        assert apart < bound(options.get("precision")), (kind, options, op)
        num_steps = num_epochs * (2 if "accumulated" in options else 6)
        assert num_sent == num_steps * num_parameters, (kind, options, op)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Whole, {"accumulated": 3}),
        (Whole, {"accumulated": 3, "clip": "each"}),
        (Learning, {}),
        (Own, {"clip": "jointly"}),
    ],
)
def test_apex_unscales_a_gradient_of_two_optimizers_once(kind, options, monkeypatch):
    """The scale is a power of two, and the arithmetic is that of float64."""
    with stand_in(monkeypatch):
        found = fit(kind(), make_engine=partial(dl.APEXEngine, "cpu"), **options)

    assert (found - by_hand(**options)).abs().max() < bound("fp32")


def test_a_step_first_unscales_what_apex_has_accumulated(monkeypatch):
    """For all optimizers of a parameter together, if no backward pass has done it."""
    mine, theirs = Shared().double(), Shared().double()
    batch = data(torch.float64)[:BATCH_SIZE]
    with stand_in(monkeypatch):
        engine = dl.APEXEngine("cpu")
        engine.setup()
        _, optimizers = engine.prepare({"": mine}, optimizers_of(mine))
        with engine.accumulate(mine):
            engine.backward(loss_of(mine, *batch))
        for each in optimizers.values():
            assert engine.step(each)

    loss_of(theirs, *batch).backward()
    for each in optimizers_of(theirs).values():
        each.step()
    assert (weights(mine) - weights(theirs)).abs().max() < bound("fp32")


def test_optimizers_that_would_overwrite_one_another_are_refused(monkeypatch):
    """Under Apex's O2, each has weights of its own."""
    make = partial(dl.APEXEngine, "cpu", opt_level="O2")
    with stand_in(monkeypatch), pytest.raises(ValueError, match=r"several optimizers.*O1.*AMPEngine"):
        fit(Whole(), make_engine=make)


def test_a_parameter_that_is_twice_in_one_optimizer_is_not_shared():
    """torch only warns of it, so Horovod and Apex must not refuse it as one of several optimizers."""
    parameter, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = torch.optim.SGD([parameter, parameter, other], lr=0.1)

    assert shared_parameters([twice]) == {}
    assert shared_parameters([twice, torch.optim.SGD([parameter], lr=0.1)]) == {(0, 1): [parameter]}
