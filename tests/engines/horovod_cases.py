"""Cases for two processes under Horovod: each function runs in both, and tests check rank zero's results."""

import logging
import warnings
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.precision import AMP
from tests import tiny
from tests.engines import test_closures
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, sgd, weights

BATCH_SIZE = 8
NUM_SAMPLES = 20 * 2 * BATCH_SIZE  # 20 steps of two processes
FP16 = AMP(torch.float16, scaler={"init_scale": 1024.0})
CLIP = {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": 0.1}}


def train(engine, *, num_samples=NUM_SAMPLES, **options):
    """Train a supervised model; return the runner."""
    return tiny.train(engine=engine, **{"loaders": {"train": loader(num_samples, BATCH_SIZE)}, **options})


@contextmanager
def sent_gradients():
    """Collect the dtypes of the gradients that Horovod sends."""
    import horovod.torch.optimizer as module

    original, types = module.allreduce_async_, []

    def counting(tensor, *args, **kwargs):
        types.append(tensor.dtype)
        return original(tensor, *args, **kwargs)

    module.allreduce_async_ = counting
    try:
        yield types
    finally:
        module.allreduce_async_ = original


# Arguments of the engine and of the training.
TRAININGS = {
    "fp32": ({}, {}),
    "gradients_summed": ({"op": "sum"}, {}),
    "fp16_compression": ({"compression": "fp16"}, {}),
    "clipped": ({}, {"callbacks": [dl.OptimizerCallback("loss", **CLIP)]}),
    "clipped_under_a_scaler": ({"precision": FP16}, {"callbacks": [dl.BackwardCallback("loss", **CLIP)]}),
    "accumulated": (  # 11 batches in steps of 4, so the last step has 3
        {},
        {"num_samples": 11 * 2 * BATCH_SIZE, "callbacks": [dl.OptimizerCallback("loss", accumulation_steps=4)]},
    ),
}


def trainings(folder):
    found = {}
    for name, (of_engine, options) in TRAININGS.items():
        with sent_gradients() as sent:
            found[name] = weights(train(dl.HorovodEngine(**of_engine), **options).model), len(sent), set(sent)
    return found


class Steep(dl.Runner):
    """A runner whose only gradient is 40,000, so the sum over two processes exceeds half precision's maximum,
    65,504."""

    def handle_batch(self, batch):
        self.batch_metrics["loss"] = 40_000 * self.model(batch).mean()


def large_gradients_in_fp16(folder):
    found = {}
    for factor in (1.0, 2.0):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        engine = dl.HorovodEngine(compression="fp16", gradient_predivide_factor=factor)
        callbacks = [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")]
        data = {"train": DataLoader(torch.ones(2, 1), batch_size=1)}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        train(engine, model=model, runner=Steep(), optimizer=optimizer, loaders=data, callbacks=callbacks)
        found[factor] = model.weight.item()
    return found


class OneRankOverflows(dl.Callback):
    """A callback that makes rank one's gradient infinite in the second step, between the forward and backward pass."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.Metric)

    def on_batch_end(self, runner):
        if runner.batch_step == 2 and runner.engine.rank == 1:
            runner.batch_metrics["loss"] = runner.batch_metrics["loss"] * float("inf")


def overflow_in_one_rank(folder):
    runner = train(dl.HorovodEngine(precision=FP16), callbacks=[OneRankOverflows()])
    everybodys = runner.engine.gather_object(weights(runner.model))
    return runner.epoch_metrics["train"]["skipped_steps"], everybodys


class ByHand(dl.Runner):
    """A runner that makes the whole step in handle_batch, in one of the usual ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def handle_batch(self, batch):
        features, targets = batch
        loss = nn.functional.cross_entropy(self.model(features), targets)
        if self.way == "plain":
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        elif self.way == "engine":
            self.optimizer.zero_grad(set_to_none=True)
            self.engine.backward(loss)
            self.engine.step(self.optimizer)
        elif self.way == "zero last":
            self.engine.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        elif self.way == "clip, plain step":
            self.optimizer.zero_grad()
            self.engine.backward(loss)
            self.engine.clip_gradients(self.optimizer, lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e6))
            self.optimizer.step()
        elif self.way == "Horovod's own":
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.synchronize()
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.zero_grad()
            self.engine.backward(loss / 4, self.optimizer)
            again = nn.functional.cross_entropy(self.model(features), targets)
            self.engine.backward(again * 3 / 4, self.optimizer)
            self.engine.step(self.optimizer)


WAYS = ("plain", "engine", "zero last", "clip, plain step", "Horovod's own", "two losses")


def by_hand(folder):
    results = {}
    for way in WAYS:
        for op in ("average", "sum"):
            model = mlp()
            with sent_gradients() as sent:
                train(dl.HorovodEngine(op=op), model=model, runner=ByHand(way))
            results[way, op] = weights(model), len(sent)
    return results


class OverflowsByHand(dl.Runner):
    """A runner whose loss on rank one is infinite in the second step."""

    def handle_batch(self, batch):
        features, targets = batch
        loss = nn.functional.cross_entropy(self.model(features), targets)
        self.optimizer.zero_grad()
        self.engine.backward(loss * float("inf") if self.batch_step == 2 and self.engine.rank == 1 else loss)
        self.batch_metrics["has_stepped"] = float(self.engine.step(self.optimizer))


def overflow_by_hand(folder):
    model = mlp()
    runner = train(dl.HorovodEngine(precision=FP16), model=model, runner=OverflowsByHand())
    return runner.epoch_metrics["train"]["has_stepped"], runner.engine.gather_object(weights(model))


class Adversaries(dl.Runner):
    """A generator and a discriminator, where the generator's loss leaves gradients in the discriminator."""

    def handle_batch(self, batch):
        features, _ = batch
        step_of_adversaries(self.model, self.optimizer, features, self.engine.backward, self.engine.step)


def step_of_adversaries(models, optimizers, features, backward, step):
    fake = models["generator"](features)
    optimizers["discriminator"].zero_grad()
    backward((models["discriminator"](fake.detach()) - models["discriminator"](features[:, :3])).mean())
    step(optimizers["discriminator"])
    optimizers["generator"].zero_grad()
    backward(-models["discriminator"](fake).mean())
    step(optimizers["generator"])


def adversaries():
    """Return two models and their optimizers."""
    models = {"generator": mlp(), "discriminator": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in models["discriminator"].parameters():
            nn.init.normal_(parameter, std=0.5)
    return models, {key: sgd(model, lr=0.01) for key, model in models.items()}


def gan(folder):
    models, optimizers = adversaries()
    train(dl.HorovodEngine(), model=models, optimizer=optimizers, runner=Adversaries())
    return torch.cat([weights(model) for model in models.values()])


def one_cycle(model):
    """Return an optimizer and a scheduler that steps with it and changes its momentum too."""
    optimizer = sgd(model)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=25)


def batch_scheduler(folder):
    model = mlp()
    optimizer, scheduler = one_cycle(model)
    train(dl.HorovodEngine(), model=model, optimizer=optimizer, scheduler=scheduler)
    return weights(model), optimizer.param_groups[0]["lr"], scheduler.optimizer is optimizer


def plateau_scheduler(folder):
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=10.0, patience=0)
    train(dl.HorovodEngine(), model=model, optimizer=optimizer, scheduler=scheduler, num_epochs=3)
    return optimizer.param_groups[0]["lr"]


def the_users_optimizer_goes_on(folder):
    """Run Adam twice with its state kept in the user's optimizer, and a hook registered before."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for _ in range(2):
        runner = train(dl.HorovodEngine(), model=model, optimizer=optimizer)
        assert runner.optimizer is optimizer
    return weights(model), len(steps)


class NeedsTwo(torch.optim.SGD):
    """An optimizer that needs more arguments than the parameters."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)


def unwrappable(folder):
    model = mlp()
    try:
        train(dl.HorovodEngine(), model=model, optimizer=NeedsTwo(model.parameters(), 0.1))
    except TypeError as error:
        return str(error)


class Blended(torch.optim.SGD):
    """An optimizer that keeps an argument as an attribute, not in its groups."""

    def __init__(self, params, lr=0.1, divisor=1):
        super().__init__(params, lr=lr)
        self.divisor = divisor

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(self.divisor)
        return super().step(closure)


def own_attributes(folder):
    model = mlp()
    optimizer = Blended(model.parameters(), lr=0.1, divisor=4)
    return weights(train(dl.HorovodEngine(), model=model, optimizer=optimizer).model)


def closures(folder):
    return test_closures.train(dl.HorovodEngine(), test_closures.model_of("odd"), batch_size=16)


class Odd(nn.Module):
    """A model with parameters and buffers of dtypes that Horovod cannot send, and a layout that it refuses."""

    def __init__(self, rank):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            self.layers = mlp(batch_norm=True)
            self.conv = nn.Conv2d(2, 4, 3, padding=1)
            self.brain = nn.Parameter(torch.randn(3).bfloat16())
            self.table = nn.Embedding(4, 3, sparse=True)
        self.register_buffer("mask", torch.full((5,), bool(rank)))
        self.register_buffer("steps", torch.tensor([rank], dtype=torch.int16))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, features):
        images = features.repeat(1, 6).view(-1, 2, 3, 6)
        image_logits = self.conv(images.contiguous(memory_format=torch.channels_last)).mean(dim=(2, 3))[:, :3]
        return self.layers(features) + image_logits + self.brain.float() + self.table(features[:, 0].long().abs() % 4)


def models_that_differ(folder):
    """Train ranks that start with different weights; rank zero's are used, and parameters stay equal."""
    import horovod.torch as hvd

    model = Odd(hvd.rank())
    data = {"train": loader(64, BATCH_SIZE), "valid": loader(41, BATCH_SIZE)}
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loaders": data}
    metric = dl.AccuracyCallback("logits", "targets")
    runner = train(dl.HorovodEngine(channels_last=True), model=model, callbacks=[metric], **options)
    states = runner.engine.gather_object({name: each.clone() for name, each in model.state_dict().items()})
    return states, runner.epoch_metrics["valid"], model, runner.loader_sample_step


class Reductions(dl.Runner):
    """A runner that calls the engine's collectives."""

    def handle_batch(self, batch):
        pass

    def on_epoch_end(self, runner):
        rank = self.engine.rank
        thirds = torch.tensor([1.0, 1e-12], dtype=torch.float64) / 3
        self.reduced = {
            "sum": self.engine.reduce(thirds + rank),
            "mean": self.engine.reduce(torch.tensor(rank * 1.0), "mean"),
            "min": self.engine.reduce(torch.tensor([rank, 5]), "min"),
            "max": self.engine.reduce(torch.tensor(rank, dtype=torch.bfloat16), "max"),
            "strided": self.engine.reduce(torch.arange(6.0).view(2, 3).T),
        }
        self.gathered = self.engine.gather_object("zero" if rank == 0 else {"rank": rank})
        self.received = self.engine.broadcast_object({"from": rank} if rank == 0 else None)
        self.engine.barrier()


def collectives(folder):
    runner = train(dl.HorovodEngine(), runner=Reductions(), num_samples=16)
    return runner.reduced, runner.gathered, runner.engine.gather_object(runner.received)


def resumable(logdir, *, callbacks=None, **options):
    model = mlp(dropout=0.3, batch_norm=True)
    best = {"monitor": "valid/loss", "mode": "min"}
    save = dl.CheckpointCallback(logdir, content="runner", every_steps=1, **best)
    options |= {"callbacks": {"checkpoint": save, **(callbacks or {})}, "logdir": logdir, "num_epochs": 3}
    data = {"train": loader(80, BATCH_SIZE, shuffle=True), "valid": loader(21, BATCH_SIZE)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return train(dl.HorovodEngine(), model=model, optimizer=optimizer, loaders=data, **options)


def resumed(folder):
    whole = resumable(f"{folder}/whole")
    try:
        resumable(f"{folder}/parts", callbacks={"interrupt": Interrupt(7)})
    except KeyboardInterrupt:
        parts = resumable(f"{folder}/parts", resume="auto")
    return (weights(whole.model), whole.epoch_metrics), (weights(parts.model), parts.epoch_metrics)


def sync_bn_on_a_cpu(folder):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("runnerkit.engines.horovod").addHandler(handler)
    train(dl.HorovodEngine(sync_bn=True), num_samples=16)
    return messages


def allreduces_are_left(folder):
    """Return the gradients sent by a backward pass after the run, when the model is the user's again."""
    model = mlp()
    train(dl.HorovodEngine(), model=model)
    with sent_gradients() as sent:
        model(torch.ones(1, 6)).sum().backward()
    return sent


CASES = (
    trainings, large_gradients_in_fp16, overflow_in_one_rank, by_hand, overflow_by_hand, gan, batch_scheduler,
    plateau_scheduler, the_users_optimizer_goes_on, unwrappable, own_attributes, closures, models_that_differ,
    collectives, resumed, sync_bn_on_a_cpu, allreduces_are_left,
)  # fmt: skip


def run_all(folder):
    """Run all cases, with warnings as errors."""
    warnings.simplefilter("error")
    return {case.__name__: case(folder) for case in CASES}
