"""Gradients that an engine of several processes does not average: an error says so before a step uses them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.precision import AMP
from tests.engines.together import together
from tests.tiny import NUM_FEATURES, classification, weights

LATE = ("would not be averaged over processes", "frozen, or not yet in the model", "in another stage")
METHODS = ("differ between ranks", "forward choose: self.model(x, part='encode')")


class Net(nn.Module):
    """A network with a method other than forward; forward may choose it too."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.encoder, self.head = nn.Linear(NUM_FEATURES, 4), nn.Linear(4, 3)

    def encode(self, features):
        return self.encoder(features).tanh()

    def forward(self, features, part="all"):
        encoded = self.encode(features)
        return encoded if part == "encode" else self.head(encoded)


class Case(dl.IRunner):
    """Three epochs of two steps over global batches of 12."""

    freezes = None  # the part that is frozen when the model is wrapped

    def __init__(self, engine):
        super().__init__()
        self._engine, self.num_epochs = engine, 3

    def get_engine(self):
        return self._engine

    def get_loaders(self, stage):
        return {"train": DataLoader(classification(24), batch_size=12 // self.engine.num_processes)}

    def get_model(self, stage):
        net = Net()
        if self.freezes:
            net.get_submodule(self.freezes).requires_grad_(False)
        return net

    def get_optimizer(self, stage, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def get_callbacks(self, stage):
        return {"backward": dl.BackwardCallback("loss"), "optimizer": dl.OptimizerCallback("loss")}

    def logits(self, features):
        return self.model(features)

    def handle_batch(self, batch):
        features, targets = batch
        self.batch_metrics["loss"] = nn.functional.cross_entropy(self.logits(features), targets)

    @property
    def trained(self):
        return self.engine.trained_module(self.model)


class Unwrapped(Case):
    def logits(self, features):
        inner = self.engine.unwrap(self.model)
        return inner.head(inner.encode(features))


class UnwrappedLater(Unwrapped):
    def logits(self, features):
        return super().logits(features) if self.epoch_step == 2 else self.model(features)


class PartlyUnwrapped(Unwrapped):
    """The wrapper's forward runs as well, for another part."""

    def logits(self, features):
        self.model(features).sum().backward()
        return super().logits(features) + self.engine.unwrap(self.model)(features)


class Method(Case):
    def logits(self, features):
        return self.model.encode(features)[:, :3]


class Unfrozen(Case):
    freezes = "encoder"

    def on_epoch_start(self, runner):
        self.trained.encoder.requires_grad_(self.epoch_step > 1)


class UnfrozenWithinAnEpoch(Case):
    freezes = "encoder"

    def on_batch_start(self, runner):
        self.trained.encoder.requires_grad_(self.batch_step > 3)


class FrozenForAWhile(Case):
    """The first layer rests in one epoch, which DDP allows with find_unused_parameters=True."""

    def on_epoch_start(self, runner):
        self.trained.encoder.requires_grad_(self.epoch_step != 2)


class Freezes(Case):
    """The same by the callback, in the first epoch."""

    def get_callbacks(self, stage):
        return {**super().get_callbacks(stage), "freeze": dl.FreezeCallback("encoder", until_epoch=1)}


class Verified(Unfrozen):
    """Weights are compared after each pass as well."""

    def get_callbacks(self, stage):
        return {**super().get_callbacks(stage), "verify": dl.VerifyRanksCallback()}


class Replaced(Case):
    def on_epoch_start(self, runner):
        if self.epoch_step == 2:
            self.trained.head = nn.Linear(4, 3)
            self.optimizer.add_param_group({"params": self.trained.head.parameters()})


class Added(Case):
    """A new part, added to the optimizer in the middle of an epoch, whose first use is in the next step."""

    def on_batch_end(self, runner):
        if self.batch_step == 3:
            self.trained.more = nn.Linear(3, 3)
            self.trained.register_forward_hook(lambda module, _, output: module.more(output))
            self.optimizer.add_param_group({"params": self.trained.more.parameters()})


class TwoBackwardPasses(Case):
    """Of one forward pass, of which DDP averages only the first."""

    def get_callbacks(self, stage):
        return {}

    def handle_batch(self, batch):
        features, targets = batch
        logits = self.model(features)
        self.engine.zero_grad(self.optimizer)
        loss = nn.functional.cross_entropy(logits, targets)
        (0.5 * loss).backward(retain_graph=True)
        self.engine.backward(0.5 * loss)
        self.engine.step(self.optimizer)


class Accumulates(Case):
    def __init__(self, engine):
        super().__init__(engine)
        self.accumulation_steps = 2


class LocalSteps(Case):
    """Steps of each rank alone, as the user asks for."""

    def get_callbacks(self, stage):
        return {}

    def handle_batch(self, batch):
        features, targets = batch
        self.engine.zero_grad(self.optimizer)
        with self.engine.no_sync(self.model):
            self.engine.backward(nn.functional.cross_entropy(self.model(features), targets))
        self.engine.step(self.optimizer)


class Adversaries(Case):
    """A GAN: each step trains both models, and freezes the discriminator for the generator's step."""

    unwraps = False

    def get_model(self, stage):
        return {"generator": Net(), "discriminator": nn.Linear(3, 1)}

    def get_optimizer(self, stage, model):
        return {key: torch.optim.SGD(each.parameters(), lr=0.1) for key, each in model.items()}

    def get_callbacks(self, stage):
        return {}

    def handle_batch(self, batch):
        features, _ = batch
        generator, discriminator = self.model["generator"], self.model["discriminator"]
        if self.unwraps:
            discriminator = self.engine.unwrap(discriminator)
        fake = generator(features)
        self.engine.zero_grad(self.optimizer["discriminator"])
        self.engine.backward((discriminator(fake.detach()) - discriminator(features[:, :3])).square().mean())
        self.engine.step(self.optimizer["discriminator"])
        discriminator.requires_grad_(False)
        self.engine.zero_grad(self.optimizer["generator"])
        self.engine.backward(-discriminator(fake).mean())
        self.engine.step(self.optimizer["generator"])
        discriminator.requires_grad_(True)


class UnwrappedDiscriminator(Adversaries):
    unwraps = True


def outcome(case, engine):
    """Return the trained weights, or the error's text with its notes."""
    try:
        model = case(engine).run().model
    except Exception as error:
        return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
    models = model.values() if isinstance(model, dict) else [model]
    return torch.cat([weights(each) for each in models])


def ddp(**arguments):
    return partial(dl.DistributedDataParallelEngine, device="cpu", **arguments)


OF_DDP = {
    **dict.fromkeys((Case, Unwrapped, UnwrappedLater, PartlyUnwrapped, Method, UnfrozenWithinAnEpoch, Added), ddp()),
    **dict.fromkeys((Verified, TwoBackwardPasses, Accumulates, LocalSteps, Adversaries, UnwrappedDiscriminator), ddp()),
    **dict.fromkeys((FrozenForAWhile, Freezes, Replaced), ddp(find_unused_parameters=True)),
    Unfrozen: ddp(precision=AMP(torch.float16)),
}
fsdp = partial(dl.FullyShardedDataParallelEngine, device="cpu")
OF_FSDP = (
    Case, Unwrapped, PartlyUnwrapped, Method, Unfrozen, UnfrozenWithinAnEpoch, Freezes, Replaced, Added, Adversaries,
)  # fmt: skip
OF_HOROVOD = (Case, Unwrapped, Unfrozen, UnfrozenWithinAnEpoch, Freezes, Replaced, Added, Adversaries)


@pytest.fixture(scope="module")
def with_ddp():
    return together(lambda: {case: outcome(case, engine()) for case, engine in OF_DDP.items()})


@pytest.fixture(scope="module")
def with_fsdp():
    return together(lambda: {case: outcome(case, fsdp()) for case in OF_FSDP})


@pytest.fixture(scope="module")
def with_horovod():
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")
    return dl.HorovodEngine(2, device="cpu").launch(
        lambda: {case: outcome(case, dl.HorovodEngine(device="cpu")) for case in OF_HOROVOD}
    )


def assert_outcome(found, case, words):
    """Compare with the words of the error, or with the weights of one process."""
    if words is not None:
        assert isinstance(found[case], str), "no error"
        assert all(each in found[case] for each in words), found[case]
        return
    expected = outcome(case, dl.CPUEngine())
    assert isinstance(found[case], torch.Tensor), found[case]
    torch.testing.assert_close(found[case], expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case, None),
        (
            Unwrapped,
            ("ValueError", "'encoder.weight', 'encoder.bias', 'head.weight', 'head.bias'", "epoch 1", *METHODS),
        ),
        (UnwrappedLater, ("'encoder.weight'", "epoch 2", *METHODS)),
        (PartlyUnwrapped, ("'head.bias'", "one backward pass", *METHODS)),
        (Method, ("AttributeError", "self.model(x, part='encode')")),
        (Unfrozen, ("ValueError", "2 parameters ('encoder.weight', 'encoder.bias')", "epoch 2", *LATE)),
        (UnfrozenWithinAnEpoch, ("'encoder.weight', 'encoder.bias'", "batch 2 of loader 'train', epoch 2", *LATE)),
        (Verified, ("'encoder.weight', 'encoder.bias'", "epoch 2", *LATE)),
        (FrozenForAWhile, None),
        (Freezes, None),
        (Replaced, ("'head.weight', 'head.bias'", "epoch 2", *LATE)),
        (Added, ("'more.weight', 'more.bias'", "batch 2 of loader 'train', epoch 2", *LATE)),
        (TwoBackwardPasses, ("'head.bias'", "Add up the losses", *METHODS)),
        (Accumulates, None),
        (Adversaries, None),
        (UnwrappedDiscriminator, ("'discriminator.weight'", *METHODS)),
    ],
)
def test_ddp_averages_or_raises(with_ddp, case, words):
    """An error names parameters, cause and remedy; without one, the weights equal those of one process."""
    assert_outcome(with_ddp, case, words)


@pytest.mark.slow
def test_ddp_lets_ranks_step_alone_if_asked_to(with_ddp):
    """With ``no_sync`` around the last backward pass, gradients differ by intention."""
    assert isinstance(with_ddp[LocalSteps], torch.Tensor), with_ddp[LocalSteps]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case, None),
        (Unwrapped, ("ValueError", "does not train", "self.model(x, part='encode')", "'encoder.weight'")),
        (PartlyUnwrapped, ("ValueError", "does not train", "self.model(x, part='encode')")),
        (Method, ("RuntimeError", "self.model(x, part='encode')")),
        (Unfrozen, None),
        (UnfrozenWithinAnEpoch, None),
        (Freezes, None),
        (Replaced, ("'head.weight', 'head.bias'", "epoch 2", *LATE)),
        (Added, ("'more.weight', 'more.bias'", "epoch 2", *LATE)),
        (Adversaries, None),
    ],
)
def test_fsdp_averages_or_raises(with_fsdp, case, words):
    """FSDP2 averages what is unfrozen later; other methods and new parts raise an error."""
    assert_outcome(with_fsdp, case, words)


@pytest.mark.horovod
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case, None),
        (Unwrapped, None),
        (Unfrozen, ("ValueError", "'encoder.weight', 'encoder.bias'", "epoch 2", *LATE)),
        (UnfrozenWithinAnEpoch, ("'encoder.weight', 'encoder.bias'", "batch 2 of loader 'train', epoch 2", *LATE)),
        (Freezes, None),
        (Replaced, ("'head.weight', 'head.bias'", "epoch 2", *LATE)),
        (Added, ("'more.weight', 'more.bias'", "epoch 2", *LATE)),
        (Adversaries, None),
    ],
)
def test_horovod_averages_or_raises(with_horovod, case, words):
    """Horovod averages whatever the optimizer held when the stage began, by any method."""
    assert_outcome(with_horovod, case, words)
