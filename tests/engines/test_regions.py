"""Activation checkpointing and compilation of modules chosen by class, against runs without them."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests import tiny
from tests.engines.on_cpu import ddp, fsdp
from tests.engines.together import together
from tests.interrupt import Interrupt

# torch.compile itself looks at the gradient of its inputs; torch hides the warning unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

BATCH_SIZE = 8


class Block(nn.Module):
    """A residual block with dropout and batch norm, and a keyword argument."""

    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.3)

    def forward(self, x, *, scale=1.0):
        return x + self.dropout(self.norm(self.narrow(torch.relu(self.wide(x)) * scale)))


class Net(nn.Sequential):
    def __init__(self, num_blocks=3):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(nn.Linear(6, 16), *(Block(16) for _ in range(num_blocks)), nn.Linear(16, 3))


def train(model, engine, **options):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 6, generator=generator), torch.arange(32) % 3)
    loaders = {key: DataLoader(data, batch_size=BATCH_SIZE) for key in ("train", "valid")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tiny.train(model, optimizer=optimizer, loaders=loaders, num_epochs=2, engine=engine, **options)


def assert_same(mine, theirs):
    """Compare weights and buffers bit for bit."""
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)


EAGER = {"modules": [Block], "backend": "eager"}
OPTIONS = {
    "checkpointed": {"checkpoint_modules": [Block]},
    "kept results": {"checkpoint_modules": [Block], "checkpoint_kept_ops": [torch.ops.aten.addmm.default]},
    "a part of each block": {"checkpoint_modules": [nn.Linear, nn.BatchNorm1d]},
    "the model": {"checkpoint_modules": [Net]},
    "nested": {"checkpoint_modules": [Net, Block]},
    "compiled": {"compile": EAGER},
    "both": {"checkpoint_modules": [Block], "compile": EAGER},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weights_are_those_of_a_run_without_it(options):
    """Dropout draws the same again in the second computation, and running statistics count each batch once."""
    mine, theirs = Net(), Net()
    runner = train(mine, dl.CPUEngine(**options))
    plain = train(theirs, dl.CPUEngine())

    assert_same(mine, theirs)
    assert runner.epoch_metrics == plain.epoch_metrics
    assert runner.model is mine
    assert {type(each) for each in mine.modules()} == {type(each) for each in theirs.modules()}


ENGINES = {
    "ddp": (ddp, {}),
    "fsdp by blocks": (fsdp, {"shard_modules": [Block]}),
    "fsdp by layers": (fsdp, {"shard_modules": [nn.Linear]}),  # units within what is recomputed
}


def train_pairs():
    """Train with and without it in processes that exist; return the states of both models, and a block's class."""
    found = {}
    for name, (engine, options) in ENGINES.items():
        torch.compiler.reset()  # the graphs of the engine before
        mine, theirs = Net(), Net()
        train(mine, engine(**OPTIONS["both"], **options))
        train(theirs, engine(**options))
        found[name] = mine.state_dict(), theirs.state_dict(), type(mine[1]).__name__
    return found


@pytest.mark.cold
def test_two_processes_train_as_without_it():
    """Recomputation in the backward pass finds the weights of its unit gathered."""
    found = together(train_pairs)

    assert found.keys() == ENGINES.keys()
    for name, (mine, theirs, kind) in found.items():
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
        assert kind == "Block"


class Count(TorchDispatchMode):
    """Counts matrix products, and bytes that the backward pass of a forward pass keeps."""

    def __init__(self):
        super().__init__()
        self.num_products = self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_products += function is torch.ops.aten.addmm.default
        return function(*args, **(kwargs or {}))

    def keep(self, tensor):
        self.num_bytes += tensor.nbytes
        return tensor


class Counting(dl.Callback):
    """Counts during the first training batch, whose forward pass begins after ``on_batch_start``."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.External)
        self.count = Count()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.count.keep, lambda tensor: tensor)

    def on_loader_start(self, runner):
        self.is_first = runner.is_train_loader and runner.epoch_step == 1

    def on_batch_start(self, runner):
        if self.is_first:
            self.count.__enter__()
            self.hooks.__enter__()

    def on_batch_end(self, runner):
        if self.is_first:
            self.hooks.__exit__(None, None, None)
            self.count.__exit__(None, None, None)
        self.is_first = False


def counted(**options):
    callback = Counting()
    train(Net(), dl.CPUEngine(**options), callbacks=[callback])
    return callback.count


def test_activations_are_not_kept_but_recomputed():
    """Saved-tensor hooks see fewer bytes; each block's two products run again, unless their results are kept."""
    plain, recomputed, kept = counted(), counted(**OPTIONS["checkpointed"]), counted(**OPTIONS["kept results"])

    assert recomputed.num_bytes < 0.2 * plain.num_bytes
    assert (plain.num_products, recomputed.num_products, kept.num_products) == (8, 14, 8)


def test_blocks_of_a_class_are_compiled_once():
    """One graph serves all blocks in training and one in evaluation, however deep the model is."""
    numbers = []
    for num_blocks in (2, 5):
        graphs = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        train(Net(num_blocks), dl.CPUEngine(compile={"modules": [Block], "backend": backend, "dynamic": False}))
        numbers.append(len(graphs))

    assert numbers == [2, 2]


def test_modules_have_their_class_after_a_failure():
    """Also while the run fails, nothing of it stays in the user's model."""
    model = Net()
    with pytest.raises(KeyboardInterrupt):
        train(model, dl.CPUEngine(**OPTIONS["both"]), callbacks=[Interrupt(1)])

    assert type(model[1]) is Block


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"checkpoint_modules": nn.Linear}, TypeError, r"checkpoint_modules must be a list .* such as \[nn.Linear\]"),
        ({"checkpoint_modules": [3]}, TypeError, r"checkpoint_modules must hold classes of modules.*got 3"),
        ({"compile": {"modules": ["Block"]}}, TypeError, r"compile's modules must hold classes of modules"),
        ({"checkpoint_kept_ops": [torch.ops.aten.mm.default]}, ValueError, r"checkpoint_kept_ops needs checkpoint_mod"),
        ({"checkpoint_modules": [nn.GRU]}, ValueError, "checkpoint_modules contains GRU, but the model does not; it"),
        ({"compile": {"modules": [nn.GRU]}}, ValueError, r"compile's modules contains GRU, but the model does not"),
    ],
)
def test_wrong_classes_are_named(options, error, message):
    """Engines refuse what is not a class when they are made, and a class that does not occur when a stage starts."""
    with pytest.raises(error, match=message):
        train(Net(), dl.CPUEngine(**options))


def test_a_lazy_module_is_refused():
    """Its class changes in the first batch; within a chosen module it may be lazy."""
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"LazyLinear in checkpoint_modules or .* needs the shapes .*'weight', 'bias'"):
        tiny.train(model, engine=dl.CPUEngine(checkpoint_modules=[nn.Linear]))

    tiny.train(model, engine=dl.CPUEngine(checkpoint_modules=[nn.Sequential]))
    assert type(model[0]) is nn.Linear


def test_a_module_with_a_forward_of_its_own_is_refused():
    """A ``forward`` that was set on the object hides that of its class."""
    model = Net()
    model[1].forward = lambda x: x
    with pytest.raises(ValueError, match="a Block has a forward of its own, not that of its class"):
        train(model, dl.CPUEngine(checkpoint_modules=[Block]))
