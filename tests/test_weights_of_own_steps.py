"""Weights of losses that users pass to ``engine.backward``, against hand-written loops in float64."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from tests.engines.together import together
from tests.interrupt import at
from tests.test_weights import EXACT, Stream, data, fit, steps
from tests.tiny import classification, mlp, sgd, train, weights

MAX_NORM = 0.05


def mean_loss(model, features, targets):
    return nn.functional.cross_entropy(model(features), targets)


def token_loss(model, features, targets):
    """Return the mean over tokens, of which a sample of class c has c + 1."""
    losses = nn.functional.cross_entropy(model(features), targets, reduction="none")
    return (losses * (targets + 1)).sum() / (targets + 1).sum()


class Own(dl.Runner):
    """Steps by itself; batches weigh their tokens."""

    steps_itself = True

    def handle_batch(self, batch):
        self.batch_weight = (batch[1] + 1).sum()
        self.make_step(*batch)

    def loss(self, features, targets):
        return token_loss(self.model, features, targets)

    def make_step(self, features, targets):
        self.engine.zero_grad(self.optimizer)
        self.backward(features, targets)
        self.engine.step(self.optimizer)

    def backward(self, features, targets):
        self.engine.backward(self.loss(features, targets))


class BySamples(Own):
    def handle_batch(self, batch):
        self.make_step(*batch)

    def loss(self, features, targets):
        return mean_loss(self.model, features, targets)


class Plain(Own):
    """Calls the optimizer itself."""

    def make_step(self, features, targets):
        self.optimizer.zero_grad()
        self.backward(features, targets)
        self.optimizer.step()


class Clipped(Own):
    def make_step(self, features, targets):
        self.engine.zero_grad(self.optimizer)
        self.backward(features, targets)
        self.engine.clip_gradients(self.optimizer, partial(nn.utils.clip_grad_norm_, max_norm=MAX_NORM))
        self.engine.step(self.optimizer)


class InParts(Own):
    """Backpropagates two parts of the loss."""

    def backward(self, features, targets):
        for share in (0.25, 0.75):
            self.engine.backward(share * self.loss(features, targets))


class Closure(Own):
    """Computes the gradients within the step."""

    def make_step(self, features, targets):
        def closure():
            self.engine.zero_grad(self.optimizer)
            self.backward(features, targets)

        self.optimizer.step(closure)


class Learning(Own):
    """Weighed by ``learn``."""

    def make_step(self, features, targets):
        self.learn(self.loss(features, targets))


class Twice(Own):
    """Two steps on a batch, which weigh it differently; one of them by ``learn``."""

    def make_step(self, features, targets):
        super().make_step(features, targets)
        self.batch_weight = len(targets)
        self.learn(mean_loss(self.model, features, targets))


class Sums(BySamples):
    def loss(self, features, targets):
        return len(targets) * mean_loss(self.model, features, targets)


class Left(Own):
    """Leaves the step to an OptimizerCallback."""

    steps_itself = False
    make_step = Own.backward


class LeftBySamples(BySamples):
    steps_itself = False
    make_step = Own.backward


class LeftInParts(Left):
    make_step = InParts.backward


class HalfOfIt(Left):
    """Leaves half of the loss to a BackwardCallback."""

    def make_step(self, features, targets):
        self.engine.backward(0.5 * self.loss(features, targets))
        self.batch_metrics["loss"] = 0.5 * self.loss(features, targets)


class ForACallback(Left):
    def make_step(self, features, targets):
        self.batch_metrics["loss"] = self.loss(features, targets)


def of_the_user():
    """A callback that goes backward, but is not a BackwardCallback."""
    return at("on_batch_end", lambda runner: runner.engine.backward(runner.batch_metrics["loss"]), order=50)


STEPPING = {
    "samples": BySamples,
    "tokens": Own,
    "optimizer.step": Plain,
    "clipped": Clipped,
    "in parts": InParts,
    "closure": Closure,
    "learn": Learning,
    "twice": Twice,
    "sums": Sums,
}
STEPPED = {
    "samples": (LeftBySamples, list),
    "tokens": (Left, list),
    "in parts": (LeftInParts, list),
    "clipped": (Left, list),
    "half": (HalfOfIt, lambda: [dl.BackwardCallback("loss")]),
    "callback": (ForACallback, lambda: [of_the_user()]),
}
DATA = {"rows": (data, 23), "a stream": (Stream, 23), "rows, one process idle": (partial(data, 17), 17)}


def train_all(number):
    """Return the weights after each program, in `number` processes that exist."""
    found = {}
    for where, (samples, _) in DATA.items():
        fit_it = partial(fit, criterion=None, num_processes=number)
        for name, kind in STEPPING.items():
            batches = DataLoader(samples(), batch_size=8 // number)
            reduction = {"loss_reduction": "sum"} if name == "sums" else {}
            found[where, name, 2] = fit_it(batches, runner=kind(), **reduction)[0]
        for name, (kind, make) in STEPPED.items():
            clip = {"gradient_clip": MAX_NORM} if name == "clipped" else {}
            for num_batches in (1, 3):
                step = dl.OptimizerCallback("loss", accumulation_steps=num_batches, **clip)
                batches = DataLoader(samples(), batch_size=4 // number)
                found[where, name, num_batches] = fit_it(batches, runner=kind(), callbacks=[*make(), step])[0]
    return found


def by_hand(name, size, *, num_samples):
    """Take one step, or two, for each of the global batches of this size."""
    model = mlp().double()
    optimizer = sgd(model)
    losses = {"samples": [mean_loss], "twice": [token_loss, mean_loss]}.get(name, [token_loss])
    if name == "sums":
        losses = [lambda *batch: len(batch[2]) * mean_loss(*batch)]
    for batch in steps(size, of=num_samples):
        for loss in losses:
            optimizer.zero_grad()
            loss(model, *batch).backward()
            if name == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
    return weights(model)


def check(found):
    for (where, name, num_batches), actual in found.items():
        apart = (actual - by_hand(name, 4 * num_batches, num_samples=DATA[where][1])).abs().max().item()
        assert apart < 1e-12, (where, name, num_batches, apart)


def test_in_one_process_a_step_is_that_of_all_its_batches():
    """By samples and by tokens, accumulated, with a ragged end, and clipped."""
    check(train_all(1))


@pytest.fixture(scope="module")
def of_two():
    """Train everything that takes two processes in one launch."""
    return together(
        lambda: {
            "all": train_all(2),
            "adversaries": train_adversaries(2),
            "equal weights": train_with_equal_weights(),
            "selective": train_selectively(Selective, 2, leaves_out=False),
            "own first": train_own_first(2),
        }
    )


def test_in_two_processes_a_step_is_that_of_the_global_batch(of_two):
    """The same programs, whose batches the processes share, as rows or as a stream."""
    check(of_two["all"])


class Adversaries(dl.Runner):
    """Steps the judge itself, and leaves the maker, whose batches accumulate, to callbacks."""

    def handle_batch(self, batch):
        features, targets = batch
        self.batch_weight = (targets + 1).sum()
        judge = self.optimizer["judge"]
        self.engine.zero_grad(judge)
        self.engine.backward(token_loss(self.model["judge"], features, targets), judge)
        self.engine.step(judge)
        self.batch_metrics["loss"] = token_loss(self.model["maker"], features, targets)


def train_adversaries(number):
    models = {"maker": mlp().double(), "judge": mlp(seed=2).double()}
    step = dl.OptimizerCallback("loss", model_key="maker", optimizer_key="maker", accumulation_steps=2)
    options = {"callbacks": [dl.BackwardCallback("loss"), step], "criterion": None, "num_processes": number}
    options["loaders"] = {"train": DataLoader(data(), batch_size=4 // number)}
    train(models, runner=Adversaries(), optimizer={key: sgd(each) for key, each in models.items()}, **options)
    return torch.cat([weights(each) for each in models.values()])


def test_an_optimizer_that_is_named_steps_beside_a_callback_of_another(of_two):
    """Nobody divides its gradients, so its loss is divided."""
    expected = []
    for seed, size in ((1, 8), (2, 4)):
        model = mlp(seed=seed).double()
        optimizer = sgd(model)
        for batch in steps(size):
            optimizer.zero_grad()
            token_loss(model, *batch).backward()
            optimizer.step()
        expected.append(weights(model))
    for found in (train_adversaries(1), of_two["adversaries"]):
        torch.testing.assert_close(found, torch.cat(expected), **EXACT)


def train_with_equal_weights():
    """Return the losses that reached the precision and were not those of the user, and the number of sums."""
    engine = dl.DistributedDataParallelEngine(2, device="cpu")
    changed, sums, start_sum, backward = [], [], engine.start_sum, engine.precision.backward
    passed = []

    class Watched(BySamples):
        def loss(self, features, targets):
            passed.append(super().loss(features, targets))
            return passed[-1]

    def note(loss, optimizer=None):
        changed.append(loss is not passed[-1])
        backward(loss, optimizer)

    engine.start_sum = lambda value: sums.append(value) or start_sum(value)
    engine.precision.backward = note
    train(mlp().double(), runner=Watched(), criterion=None, engine=engine, loaders={"train": DataLoader(data(16), 4)})
    return changed, len(sums)


def test_equal_weights_cost_nothing(of_two):
    """The loss is backpropagated as it is, and nothing is summed over processes."""
    assert of_two["equal weights"] == ([False, False], 0)


class Selective(Left):
    """Learns from every second batch of a step."""

    leaves_out = True

    def make_step(self, features, targets):
        loss = self.loss(features, targets)
        if self.loader_batch_step % 2:
            self.engine.backward(loss)
        elif not self.leaves_out:
            self.engine.backward(0 * loss)


def train_selectively(kind, number=1, *, leaves_out=True):
    runner = kind()
    runner.leaves_out = leaves_out
    batches = DataLoader(Stream(), batch_size=4 // number)
    step = dl.OptimizerCallback("loss", accumulation_steps=2)
    return fit(batches, criterion=None, num_processes=number, runner=runner, callbacks=[step])[0]


def test_a_weighed_batch_without_a_backward_pass_is_refused(of_two):
    """The weight of the batch would be missing in the divisor; a loss of zero counts."""
    with pytest.raises(ValueError, match=r"batch_weight was set in 1 of the 2 batches.*0 \* loss"):
        train_selectively(Selective)

    model = mlp().double()
    optimizer = sgd(model)
    for features, targets in steps(8):
        optimizer.zero_grad()
        share = (targets[:4] + 1).sum().double() / (targets + 1).sum()
        (share * token_loss(model, features[:4], targets[:4])).backward()
        optimizer.step()
    expected = weights(model)
    for found in (train_selectively(Selective, leaves_out=False), of_two["selective"]):
        torch.testing.assert_close(found, expected, **EXACT)


class OwnFirst(Left):
    """Steps by itself in the first epoch, and leaves the second one to a callback."""

    def __init__(self, *, is_named):
        super().__init__()
        self.is_named = is_named

    def make_step(self, features, targets):
        is_own = self.epoch_step == 1
        if is_own:
            self.engine.zero_grad(self.optimizer)
        self.engine.backward(self.loss(features, targets), self.optimizer if is_own and self.is_named else None)
        if is_own:
            self.engine.step(self.optimizer)


def train_own_first(number):
    step = dl.ControlFlowCallback(dl.OptimizerCallback("loss", accumulation_steps=2), epochs=[2])
    found = []
    for is_named in (False, True):
        options = {"criterion": None, "num_processes": number, "callbacks": [step], "num_epochs": 2}
        found.append(fit(DataLoader(data(), 4 // number), runner=OwnFirst(is_named=is_named), **options)[0])
    return found


def test_a_callback_that_does_not_act_divides_no_gradient(of_two):
    """Another epoch, or another loader, is that of the user's steps."""
    model = mlp().double()
    optimizer = sgd(model)
    for batch in (*steps(4), *steps(8)):
        optimizer.zero_grad()
        token_loss(model, *batch).backward()
        optimizer.step()

    for found in (*train_own_first(1), *of_two["own first"]):
        torch.testing.assert_close(found, weights(model), **EXACT)


class LateSize(dl.Runner):
    def handle_batch(self, batch):
        features, targets = batch["features"].T, batch["targets"]  # features come first along the other dimension
        if self.is_early:
            self.batch_size = len(targets)
        loss = nn.functional.cross_entropy(self.model(features), targets)
        self.engine.backward(loss)
        self.batch_metrics["loss"], self.batch_size = loss.detach(), len(targets)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_batch_size_that_is_set_after_the_backward_pass_is_named(is_early, accumulation_steps, caplog):
    """It weights the logged mean only, and matters if batches are accumulated."""
    samples = classification(10)
    batches = [samples[:3], samples[3:8], samples[8:10]]
    batches = [{"features": features.T, "targets": targets} for features, targets in batches]
    runner = LateSize()
    runner.is_early = is_early
    step = dl.OptimizerCallback("loss", accumulation_steps=accumulation_steps)
    train(runner=runner, criterion=None, loaders={"train": batches}, callbacks=[step], num_epochs=2)

    warned = caplog.text.count("batch_size was set to 3 after the backward pass")
    assert warned == (not is_early and accumulation_steps > 1)


class Late(LeftBySamples):
    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.batch_weight = 2.0


@pytest.mark.parametrize(("kind", "is_late"), [(Late, True), (Left, False), (LeftBySamples, False)])
def test_a_weight_that_is_set_after_the_backward_pass_is_named(kind, is_late, caplog):
    """It weights the logged mean only; one warning in the stage says so."""
    step = dl.OptimizerCallback("loss", accumulation_steps=2)
    fit(DataLoader(data(), 4), num_processes=1, criterion=None, runner=kind(), callbacks=[step], num_epochs=2)

    warned = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert [words for words in warned if "batch_weight was set after the backward pass" in words] == warned
    assert len(warned) == is_late
