"""Programs whose `handle_batch` steps by ``learn``, against hand-written loops."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runnerkit import dl
from tests import tiny
from tests.engines.together import together
from tests.interrupt import Interrupt, at
from tests.tiny import loader, mlp, sgd, weights

NUM_SAMPLES, BATCH_SIZE, MAX_NORM = 44, 8, 0.5  # the last batch of an epoch has 4 samples


def loss_of(model, features, targets, number, *, by_tokens):
    """A loss that differs in each of the steps of a batch, or the mean over the tokens of the samples."""
    if by_tokens:
        per_sample = F.cross_entropy(model(features), targets, reduction="none")
        return (per_sample * (targets + 1)).sum() / (targets + 1).sum()
    return F.cross_entropy(model(features), targets) * (1 + number) + model(features).square().mean()


class Several(dl.Runner):
    """Makes three steps on each batch, as PPO does."""

    steps_itself = True
    steps_per_batch = 3
    by_tokens = False

    def handle_batch(self, batch):
        features, targets = batch
        if self.by_tokens:
            self.batch_weight = (targets + 1).sum()
        for number in range(3):
            loss = loss_of(self.model, features, targets, number, by_tokens=self.by_tokens)
            self.learn(loss)
        self.batch_metrics["loss"] = loss.detach()


def by_hand(*, dtype=None, scheduler=None, scale=None, num_epochs=2, by_tokens=False):
    """The same with plain PyTorch, a scheduler step after each optimizer step."""
    model = mlp()
    optimizer = sgd(model, lr=0.05)
    schedule = scheduler(optimizer) if scheduler else None
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, **({"init_scale": scale} if scale else {}))
    model.train()
    for _ in range(num_epochs):
        for features, targets in loader(NUM_SAMPLES, BATCH_SIZE):
            for number in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype) if dtype else nullcontext():
                    loss = loss_of(model, features, targets, number, by_tokens=by_tokens)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if schedule and scaler.get_scale() >= before:
                    schedule.step()
    return weights(model)


def train(runner=None, *, batch_size=BATCH_SIZE, **options):
    defaults = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9), "gradient_clip": MAX_NORM,
        "loaders": {"train": loader(NUM_SAMPLES, batch_size)}, "num_epochs": 2, "criterion": None,
    }  # fmt: skip
    return weights(tiny.train(runner=runner or Several(), **{**defaults, **options}).model)


def test_callbacks_see_that_a_batch_has_stepped():
    """From the end of the batch on."""
    seen = []
    note = at("on_batch_end", lambda runner: seen.append(runner.gradient_step.stepped_at == runner.batch_step))

    train(callbacks=[note], num_epochs=1)

    assert len(seen) == 6
    assert all(seen)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_several_steps_in_a_batch_are_those_of_a_hand_written_loop(dtype):
    """Bit for bit, clipped, in any precision; the autocast cache does not hold old weights."""
    precision = dl.AMP(dtype, scaler={"init_scale": 2.0**10} if dtype == torch.float16 else None) if dtype else None

    found = train(engine=dl.CPUEngine(precision=precision))

    assert torch.equal(found, by_hand(dtype=dtype, scale=2.0**10))


def decay(optimizer, num_steps=36):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)


@pytest.mark.parametrize("steps", ["learn", "manually"])
def test_a_scheduler_steps_after_each_of_them(steps):
    """Twelve batches of three steps are 36 steps of the schedule, each before the next optimizer step."""

    class ByHand(Several):
        def learn(self, loss, **_):
            self.engine.zero_grad(self.optimizer)
            self.engine.backward(loss)
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.engine.step(self.optimizer)

    runner = Several() if steps == "learn" else ByHand()
    options = {} if steps == "learn" else {"scheduler": lambda optimizer, _: decay(optimizer)}

    found = train(runner, callbacks=[dl.SchedulerCallback(interval="step")], **{"scheduler": decay, **options})

    assert torch.equal(found, by_hand(scheduler=decay))
    assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_each_step_is_counted(tmp_path):
    """`num_steps` ends the run after the batch that reaches it; intervals are those of steps."""
    validated = []
    validations = at("on_validation_end", lambda runner: validated.append(runner.optimizer_step))

    class Both(Several):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            self.seen = self.num_steps

    runner = Both()
    loaders = {"train": loader(NUM_SAMPLES, BATCH_SIZE), "valid": loader(8, 8)}
    saver = dl.CheckpointCallback(tmp_path, content="runner", every_steps=7)
    train(runner, loaders=loaders, num_epochs=None, num_steps=20, valid_every_steps=5, callbacks=[validations, saver])

    assert (runner.optimizer_step, runner.batch_step, runner.seen) == (21, 7, 21)
    assert validated == [6, 12, 15, 21]  # the batches that reached 5, 10, 15 and 20


def test_a_schedule_for_another_number_of_steps_raises():
    """Without steps_per_batch, the schedule would have been made for a third of the steps."""

    class Undeclared(Several):
        steps_per_batch = 1

    with pytest.raises(ValueError, match=r"num_steps was 12 .* learn.. made 3 in batch 1"):
        train(Undeclared(), scheduler=decay, callbacks=[dl.SchedulerCallback(interval="step")])

    class WithHook(Undeclared):
        scheduler_interval = "step"

        def get_scheduler(self, stage, optimizer):
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, total=self.num_steps: 1 - step / total)

    with pytest.raises(ValueError, match=r"num_steps was 12 .* learn.. made 3 in batch 1"):
        train(WithHook())
    with pytest.raises(ValueError, match=r"num_steps was 12 .* learn.. made 3 in batch 1"):
        train(Undeclared(), scheduler=decay, scheduler_interval="manual")

    class PerEpoch(Undeclared):
        def get_scheduler(self, stage, optimizer):
            return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    for interval in (None, "epoch", "manual"):  # your code may step the last after any number of steps
        assert torch.equal(train(PerEpoch(), scheduler_interval=interval), by_hand())


def test_optimizers_that_take_turns_count_as_one_step_each_batch():
    """As OptimizerCallbacks of a GAN do; one may be named by its key or passed itself, and each has its parameters."""

    class Turns(dl.Runner):
        def handle_batch(self, batch):
            features, targets = batch
            self.learn(F.cross_entropy(self.model["a"](features), targets), optimizer="a")
            self.learn(self.model["b"](features).square().mean(), optimizer=self.optimizer["b"], gradient_clip=math.inf)

    models = {"a": mlp(), "b": mlp(seed=2)}
    make = dict.fromkeys(models, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    loaders = {"train": loader(NUM_SAMPLES, BATCH_SIZE), "valid": loader(8, 8)}
    runner = tiny.train(models, runner=Turns(), criterion=None, optimizer=make, loaders=loaders)

    assert runner.optimizer_step == runner.batch_step == 6
    for key, model in models.items():
        assert runner.optimizer[key].param_groups[0]["params"] == list(model.parameters())


class Joint(dl.Runner):
    """Two models with an optimizer each, on one loss."""

    steps_itself = True
    optimizers = ("a", "b")
    by_tokens = False

    def handle_batch(self, batch):
        features, targets = batch
        if self.by_tokens:
            self.batch_weight = (targets + 1).sum()
        self.learn(joint_loss(self.model, features, targets, by_tokens=self.by_tokens), optimizer=self.optimizers)


def joint_loss(models, features, targets, *, by_tokens):
    return loss_of(lambda x: models["a"](x) + models["b"](x) ** 2, features, targets, 0, by_tokens=by_tokens)


MAKERS = {"a": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "b": partial(torch.optim.Adam, lr=0.01)}


def train_jointly(runner, *, batch_size=BATCH_SIZE, **options):
    """Return the weights of both models, and the runner."""
    models = {"a": mlp(), "b": mlp(seed=2)}
    options = {"optimizer": MAKERS, "loaders": {"train": loader(NUM_SAMPLES, batch_size)}, **options}
    tiny.train(models, runner=runner, criterion=None, num_epochs=2, gradient_clip=MAX_NORM, **options)
    return torch.cat([weights(each) for each in models.values()]), runner


def jointly_by_hand(*, by_tokens=False):
    """One backward pass, one norm over all gradients, and a step of each."""
    models = {"a": mlp(), "b": mlp(seed=2)}
    optimizers = [MAKERS[key](models[key].parameters()) for key in models]
    for _ in range(2):
        for features, targets in loader(NUM_SAMPLES, BATCH_SIZE):
            for each in optimizers:
                each.zero_grad()
            joint_loss(models, features, targets, by_tokens=by_tokens).backward()
            nn.utils.clip_grad_norm_([*models["a"].parameters(), *models["b"].parameters()], MAX_NORM)
            for each in optimizers:
                each.step()
    return torch.cat([weights(each) for each in models.values()])


def test_several_optimizers_step_on_one_loss():
    """As in a hand-written loop with one backward pass; a batch counts as one step."""
    found, runner = train_jointly(Joint())

    assert torch.equal(found, jointly_by_hand())
    assert runner.optimizer_step == runner.batch_step == 12


@pytest.mark.parametrize(
    ("optimizers", "words"),
    [
        (None, r"\['a', 'b'\]: pass optimizer=KEY, or \[KEY, ...\] to step several on one loss"),
        (["a", "c"], "needs optimizer 'c'"),
        ([], "pass optimizer=KEY"),
    ],
)
def test_the_optimizers_of_a_loss_are_named(optimizers, words):
    """Nothing steps that was not asked to."""
    runner = Joint()
    runner.optimizers = optimizers

    with pytest.raises(KeyError, match=words):
        train_jointly(runner)


class Named(dl.SupervisedRunner):
    steps_itself = True

    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.learn(F.cross_entropy(self.batch["logits"], self.batch["targets"]))


def test_a_supervised_runner_that_steps_itself_has_no_steppers():
    """Only the criterion's callback is added; evaluation loaders do not learn."""
    runner, reference = Named(), dl.SupervisedRunner()
    loaders = {key: loader(NUM_SAMPLES, BATCH_SIZE) for key in ("train", "valid")}
    options = {"criterion": nn.CrossEntropyLoss(), "loaders": loaders}

    assert torch.equal(train(runner, **options), train(reference, **options))
    assert runner.epoch_metrics["valid"]["loss"] == reference.epoch_metrics["valid"]["loss"]
    assert not any(isinstance(each, dl.OptimizerCallback) for each in runner.callbacks.values())


def misused(kind):
    class Wrong(dl.SupervisedRunner):
        steps_itself = kind != "beside a callback"

        def on_epoch_end(self, runner):
            if kind == "between batches":
                self.learn(torch.ones((), requires_grad=True))

        def handle_batch(self, batch):
            super().handle_batch(batch)
            loss = F.cross_entropy(self.batch["logits"], self.batch["targets"])
            if kind == "closure":
                self.optimizer = torch.optim.LBFGS(self.model.parameters())
            losses = {"a number": 1.0, "NaN": loss * math.nan, "foreign": torch.ones((), requires_grad=True)}
            if kind == "late NaN" and self.loader_batch_step == 3:
                loss = loss * math.nan
            if kind != "between batches":
                self.learn(losses.get(kind, loss), optimizer="b" if kind == "unknown" else None)

    return Wrong()


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("beside a callback", RuntimeError, "steps_itself = True"),
        ("between batches", RuntimeError, "call it in handle_batch"),
        ("a number", ValueError, "must be a scalar tensor with a graph, got a float"),
        ("NaN", ValueError, "is nan in batch 1 of loader 'train'"),
        ("late NaN", ValueError, "became nan within epoch 1"),
        ("foreign", RuntimeError, "does not depend on any parameter of the optimizer"),
        ("unknown", KeyError, "needs optimizer 'b'"),
        ("closure", TypeError, "LBFGS needs a closure"),
    ],
)
def test_misuse_is_explained(kind, error, words):
    """Each error says what to do."""
    with pytest.raises(error, match=words):
        train(misused(kind), gradient_clip=None)


def test_two_ways_to_clip_are_refused_before_the_backward_pass():
    """Nothing is computed, or sent to other processes, for a step that is not made."""
    seen = []

    class Both(dl.SupervisedRunner):
        steps_itself = True

        def handle_batch(self, batch):
            super().handle_batch(batch)
            loss = F.cross_entropy(self.batch["logits"], self.batch["targets"])
            loss.register_hook(seen.append)
            self.learn(loss, gradient_clip=1.0, clip=lambda parameters: None)

    with pytest.raises(ValueError, match="gradient_clip and clip: pass one"):
        train(Both(), gradient_clip=None)
    assert seen == []


def test_a_run_that_is_killed_resumes(tmp_path):
    """Within an epoch, to the same weights, with a scheduler that counts the steps."""

    def run(*callbacks, **options):
        return train(callbacks=[dl.SchedulerCallback(interval="step"), *callbacks], scheduler=decay, **options)

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(dl.CheckpointCallback(tmp_path, content="runner", every_steps=3), Interrupt(4))
    assert torch.equal(run(dl.CheckpointCallback(tmp_path, content="runner"), resume=tmp_path), whole)


class Rollouts(dl.Runner):
    """Makes its own data: a program without a data set."""

    steps_itself = True

    def handle_batch(self, number):
        features = torch.full((4, 6), float(number))
        self.learn(self.model(features).square().mean() + self.model(torch.randn(4, 6)).mean())


def without_data(numbers, **options):
    return train(Rollouts(), loaders={"train": numbers}, gradient_clip=None, num_epochs=None, **options)


def test_a_range_stands_for_a_loader_without_data(tmp_path):
    """A limit in steps ends it anywhere, and a resumed run takes the next number."""
    whole = without_data(range(10**9), num_steps=7)
    assert not torch.equal(whole, without_data(range(10**9), num_steps=6))

    without_data(range(10**9), num_steps=3, logdir=tmp_path)
    assert torch.equal(without_data(range(10**9), num_steps=7, logdir=tmp_path, resume="auto"), whole)


def in_processes():
    """Train under DDP and FSDP2, by samples and by tokens, in processes that exist."""
    engines = {
        "ddp": dl.DistributedDataParallelEngine(2, device="cpu", timeout_s=60),
        "fsdp": dl.FullyShardedDataParallelEngine(2, device="cpu", timeout_s=60),
    }
    found = {}
    for name, engine in engines.items():
        for by_tokens in (False, True):
            runner = Several()
            runner.by_tokens = by_tokens
            found[name, by_tokens] = train(runner, engine=engine, batch_size=BATCH_SIZE // 2)
            runner = Joint()
            runner.by_tokens = by_tokens
            found[f"{name}, jointly", by_tokens] = train_jointly(runner, engine=engine, batch_size=BATCH_SIZE // 2)[0]
    runner = Rollouts()
    train(runner, engine=engines["ddp"], loaders={"train": range(5)}, num_epochs=1, gradient_clip=None)
    return found, runner.batch_step


@pytest.mark.slow
def test_in_two_processes_each_step_is_that_of_the_global_batch():
    """Also of a ragged last batch, and weighted by tokens; a range gives each process all its numbers."""
    found, num_rounds = together(in_processes)

    for (name, by_tokens), actual in found.items():
        expected = (jointly_by_hand if "jointly" in name else by_hand)(by_tokens=by_tokens)
        assert (actual - expected).abs().max() < 1e-6, (name, by_tokens)
    assert num_rounds == 5


@pytest.mark.horovod
def test_under_horovod_each_step_is_that_of_the_global_batch():
    """The reference is the hand-written loop on the global batch."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")

    found = train(engine=dl.HorovodEngine(2, device="cpu"), batch_size=BATCH_SIZE // 2)

    torch.testing.assert_close(found, by_hand(), rtol=0, atol=1e-6)
