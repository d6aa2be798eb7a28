"""Cases for two processes under Horovod: each function runs in both, and tests check rank zero's results."""

import logging
import warnings
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.precision import AMP
from tests.engines import test_closures
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, quiet, sgd, weights

BATCH_SIZE = 8
NUM_SAMPLES = 20 * 2 * BATCH_SIZE  # 20 steps of two processes


def train(engine, *, model=None, optimizer=None, num_samples=NUM_SAMPLES, runner=None, **kwargs):
    """Train a supervised model; return the runner."""
    model = model if model is not None else mlp()
    return (runner or dl.SupervisedRunner()).train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer or sgd(model),
        engine=engine,
        **{"loaders": {"train": loader(num_samples, BATCH_SIZE)}, **quiet(), **kwargs},
    )


def trained(engine, **kwargs):
    """Train and return the weights."""
    return weights(train(engine, **kwargs).model)


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


def fp32(folder):
    return trained(dl.HorovodEngine())


def fp16_compression(folder):
    with sent_gradients() as sent:
        return trained(dl.HorovodEngine(compression="fp16")), set(sent)


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
        Steep().train(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
            loaders={"train": DataLoader(torch.ones(2, 1), batch_size=1)},
            callbacks=[dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")],
            engine=dl.HorovodEngine(compression="fp16", gradient_predivide_factor=factor), **quiet(),
        )  # fmt: skip
        found[factor] = model.weight.item()
    return found


def gradients_summed(folder):
    return trained(dl.HorovodEngine(op="sum"))


def amp_bf16(folder):
    return trained(dl.HorovodAMPEngine())


def amp_fp16(folder):
    return trained(dl.HorovodEngine(precision=AMP(torch.float16, scaler={"init_scale": 1024.0})))


def clipped_under_a_scaler(folder):
    clip = dl.BackwardCallback("loss", grad_clip_fn="clip_grad_norm_", grad_clip_params={"max_norm": 0.1})
    return trained(dl.HorovodEngine(precision=AMP(torch.float16, scaler={"init_scale": 1024.0})), callbacks=[clip])


def clipped(folder):
    with sent_gradients() as sent:
        clip = dl.OptimizerCallback("loss", grad_clip_fn="clip_grad_norm_", grad_clip_params={"max_norm": 0.1})
        return trained(dl.HorovodEngine(), callbacks=[clip]), len(sent)


def accumulated(folder):
    """Train on 11 batches per process in steps of 4, so the last step has 3."""
    callbacks = [dl.OptimizerCallback("loss", accumulation_steps=4)]
    with sent_gradients() as sent:
        return trained(dl.HorovodEngine(), num_samples=11 * 2 * BATCH_SIZE, callbacks=callbacks), len(sent)


class OneRankOverflows(dl.Callback):
    """A callback that makes rank one's gradient infinite in the second step, between the forward and backward pass."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.Metric)

    def on_batch_end(self, runner):
        if runner.batch_step == 2 and runner.engine.rank == 1:
            runner.batch_metrics["loss"] = runner.batch_metrics["loss"] * float("inf")


def overflow_in_one_rank(folder):
    runner = train(
        dl.HorovodEngine(precision=AMP(torch.float16, scaler={"init_scale": 1024.0})), callbacks=[OneRankOverflows()]
    )
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
                ByHand(way).train(
                    model=model,
                    optimizer=sgd(model),
                    engine=dl.HorovodEngine(op=op),
                    loaders={"train": loader(NUM_SAMPLES, BATCH_SIZE)},
                    **quiet(),
                )
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
    runner = OverflowsByHand().train(
        model=model,
        optimizer=sgd(model),
        engine=dl.HorovodEngine(precision=AMP(torch.float16, scaler={"init_scale": 1024.0})),
        loaders={"train": loader(NUM_SAMPLES, BATCH_SIZE)},
        **quiet(),
    )
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
    Adversaries().train(
        model=models,
        optimizer=optimizers,
        engine=dl.HorovodEngine(),
        loaders={"train": loader(NUM_SAMPLES, BATCH_SIZE)},
        **quiet(),
    )
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


class CountSteps:
    """A user's hook that counts its calls."""

    def __init__(self):
        self.count = 0

    def __call__(self, *_):
        self.count += 1


def the_users_optimizer_goes_on(folder):
    """Run Adam twice with its state kept in the user's optimizer, and a hook registered before."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    hook = CountSteps()
    optimizer.register_step_post_hook(hook)
    for _ in range(2):
        runner = train(dl.HorovodEngine(), model=model, optimizer=optimizer)
        assert runner.optimizer is optimizer
    return weights(model), hook.count


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
    return trained(dl.HorovodEngine(), model=model, optimizer=Blended(model.parameters(), lr=0.1, divisor=4))


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

    runner = train(
        dl.HorovodEngine(channels_last=True),
        model=(model := Odd(hvd.rank())),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": loader(64, BATCH_SIZE), "valid": loader(41, BATCH_SIZE)},
        callbacks=[dl.AccuracyCallback("logits", "targets")],
    )
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
    runner = Reductions().train(model=mlp(), engine=dl.HorovodEngine(), loaders={"train": loader(16, 8)}, **quiet())
    return runner.reduced, runner.gathered, runner.engine.gather_object(runner.received)


def resumable(logdir, **kwargs):
    model = mlp(dropout=0.3, batch_norm=True)
    callbacks = {
        "checkpoint": dl.CheckpointCallback(
            logdir, loader_key="valid", metric_key="loss", minimize=True, mode="runner", every_steps=1
        ),
        **kwargs.pop("callbacks", {}),
    }
    return train(
        dl.HorovodEngine(),
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders={"train": loader(80, BATCH_SIZE, shuffle=True), "valid": loader(21, BATCH_SIZE)},
        callbacks=callbacks,
        logdir=logdir,
        num_epochs=3,
        **kwargs,
    )


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
    fp32,
    fp16_compression,
    large_gradients_in_fp16,
    gradients_summed,
    amp_bf16,
    amp_fp16,
    clipped,
    clipped_under_a_scaler,
    accumulated,
    overflow_in_one_rank,
    by_hand,
    overflow_by_hand,
    gan,
    batch_scheduler,
    plateau_scheduler,
    the_users_optimizer_goes_on,
    unwrappable,
    own_attributes,
    closures,
    models_that_differ,
    collectives,
    resumed,
    sync_bn_on_a_cpu,
    allreduces_are_left,
)


def run_all(folder):
    """Run all cases, with warnings as errors."""
    warnings.simplefilter("error")
    return {case.__name__: case(folder) for case in CASES}
