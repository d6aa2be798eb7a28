"""Tests of the batch size, which weights a batch's metrics, for batches of any structure."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.loop.batch_size import batch_size_of
from tests.tiny import NUM_FEATURES, classification, mlp, train

FEATURES = torch.zeros(4, 2)
Pair = namedtuple("Pair", ["features", "targets"])


@dataclass
class Pictures:
    name: str
    features: Tensor
    targets: Tensor


BATCHES = [FEATURES, [torch.tensor(1.0), FEATURES], Pair(FEATURES, None), Pictures("a", FEATURES, FEATURES)]
MAPPINGS = [kind({"features": FEATURES}) for kind in (OrderedDict, UserDict, MappingProxyType)]
NESTED = {"inner": [Pictures("a", torch.tensor(1.0), UserDict(features=FEATURES))]}


@pytest.mark.parametrize("batch", [*BATCHES, *MAPPINGS, NESTED], ids=lambda batch: type(batch).__name__)
def test_the_first_tensor_with_a_dimension_is_found(batch):
    """Lists, tuples, mappings of any type and dataclasses are searched, nested ones too."""
    assert batch_size_of(batch) == 4


@pytest.mark.parametrize("batch", [None, "four", 4, torch.tensor(4), Pictures, {}], ids=str)
def test_a_batch_without_a_tensor_is_one_sample(batch):
    """A batch without a tensor, which includes a dataclass type, counts as one sample."""
    assert batch_size_of(batch) == 1


class Encoding(UserDict):
    """Mapping like a tokenizer's: it does not derive from dict and has a `to` method."""

    def to(self, device, non_blocking=False):
        return Encoding({name: each.to(device) for name, each in self.data.items()})


@pytest.mark.parametrize("wrap", [lambda x, y: Pictures("a", x, y), lambda x, y: Encoding(features=x, targets=y)])
def test_a_loss_is_the_mean_over_samples_however_batches_are_wrapped(wrap):
    """Of 33 samples in batches of 8, the last batch has one sample and an eighth of the weight."""
    data = classification(33)

    def collate(rows):
        features, targets = zip(*rows, strict=True)
        return wrap(torch.stack(features), torch.stack(targets))

    class Runner(dl.Runner):
        def handle_batch(self, batch):
            columns = batch if isinstance(batch, Encoding) else vars(batch)
            logits = self.model(columns["features"])
            self.batch_metrics["loss"] = nn.functional.cross_entropy(logits, columns["targets"])

    found = Runner(mlp(), dl.CPUEngine()).evaluate_loader(DataLoader(data, batch_size=8, collate_fn=collate))

    features, targets = data.tensors
    with torch.no_grad():
        expected = nn.functional.cross_entropy(mlp().eval()(features).double(), targets).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-6)


class Brightness(dl.Runner):
    """Runner whose metric is a mean over samples, however they are arranged."""

    def __init__(self, samples_of, size_of=None):
        super().__init__(nn.Identity(), dl.CPUEngine())
        self.samples_of, self.size_of = samples_of, size_of

    def handle_batch(self, batch):
        if self.size_of is not None:
            self.batch_size = self.size_of(batch)
        self.batch_metrics["brightness"] = torch.stack([each.mean() for each in self.samples_of(batch)]).mean()


def as_lists(rows):
    return tuple(list(column) for column in zip(*rows, strict=True))


IMAGES = [(torch.full((3, 4 + i, 5), float(value)), {"boxes": torch.zeros(i, 4)}) for i, value in enumerate("12347")]
SEQUENCES = [(torch.full((7, 2), float(value)), i) for i, value in enumerate([1, 2, 3, 4, 7])]
UNUSUAL = {
    "a list of images": (IMAGES, as_lists, lambda batch: batch[0], lambda batch: len(batch[0])),
    "images alone": (IMAGES, lambda rows: [image for image, _ in rows], list, len),
    "time first": (
        SEQUENCES,
        lambda rows: (torch.stack([row for row, _ in rows], dim=1), torch.tensor([target for _, target in rows])),
        lambda batch: batch[0].unbind(1),
        lambda batch: batch[0].shape[1],
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_samples_that_are_not_along_the_first_dimension_are_counted_by_the_user(caplog, name):
    """The mean over samples is exact if `handle_batch` sets the batch size; otherwise a warning is logged."""
    data, collate, samples_of, size_of = UNUSUAL[name]
    batches = DataLoader(data, batch_size=4, collate_fn=collate)

    right = Brightness(samples_of, size_of).evaluate_loader(batches)
    assert right["brightness"] == pytest.approx(17 / 5)
    assert "counts as" not in caplog.text

    wrong = Brightness(samples_of).evaluate_loader(batches)
    assert wrong["brightness"] == pytest.approx((10 / 4 + 7) / 2)
    [line] = [each for each in caplog.messages if "counts as" in each]
    assert "loader 'valid': its first batch counts as" in line and "the loader's batch_size is 4" in line


@pytest.mark.parametrize(
    ("batch", "is_doubtful"),
    [
        ((torch.zeros(4, 3), torch.zeros(4)), False),
        ({"features": torch.zeros(4, 3)}, False),
        (([torch.zeros(4, 3), torch.zeros(4, 3)], torch.zeros(4)), False),
        (([torch.zeros(3, 8, 8)] * 4, [{"boxes": torch.zeros(2, 4)}] * 4), True),
        ((torch.zeros(7, 4, 3), torch.zeros(4)), True),
    ],
    ids=["columns", "one column", "two views", "lists", "time first"],
)
def test_without_a_batch_size_the_parts_of_a_batch_tell(caplog, batch, is_doubtful):
    """For a loader without `batch_size`, parts of different lengths cause the warning."""
    Brightness(lambda batch: [torch.ones(1)]).evaluate_loader([batch, batch])

    assert ("its parts have the lengths" in caplog.text) is is_doubtful


WIDTHS = [torch.zeros(3, 8, 8 + width) for width in range(8)]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [([[0, 1, 2, 3], [4, 5, 6, 7]], 4), ([[0, 1, 2], [3, 4, 5], [6, 7]], None), ([[0, 1], [2, 3, 4], [5, 6, 7]], 2)],
    ids=str,
)
def test_a_batch_sampler_tells_how_many_samples_it_gave(caplog, batches, expected):
    """A list of images counts as its channels, which nothing else in the batch contradicts."""
    loader = DataLoader(WIDTHS, batch_sampler=batches, collate_fn=list)

    Brightness(lambda batch: [torch.ones(1)]).evaluate_loader(loader)

    assert ("counts as 3 samples" in caplog.text) is (expected is not None)
    assert f"its batch sampler gave {expected}" in caplog.text or expected is None


GRAPHS = [torch.full((num_nodes, NUM_FEATURES), float(value)) for num_nodes, value in ((9, 1), (1, 0), (1, 0), (1, 0))]


def as_graphs(graphs):
    """Return the nodes of several graphs, the graph of each node, and the number of graphs."""
    owners = torch.cat([torch.full((len(each),), place) for place, each in enumerate(graphs)])
    return {"nodes": torch.cat(graphs), "owners": owners, "num_graphs": len(graphs)}


class OfGraphs(dl.Runner):
    """Runner on graphs of different sizes, whose `self.batch` becomes its outputs, one row for each graph."""

    counts = False

    def handle_batch(self, batch):
        if self.counts:
            self.batch_size = batch["num_graphs"]
        sums = torch.zeros(batch["num_graphs"], NUM_FEATURES).index_add(0, batch["owners"], batch["nodes"])
        means = sums / torch.bincount(batch["owners"])[:, None]
        self.batch = {"logits": self.model(means), "graphs": means}
        self.batch_metrics["loss"] = self.batch["logits"].square().mean()
        self.batch_metrics["value"] = means.mean()


class Counting(OfGraphs):
    counts = True


def test_a_batch_that_handle_batch_replaces_is_counted_as_it_came(caplog):
    """The nodes are counted, and a warning says so, although `self.batch` has a row for each graph afterwards."""
    batches = DataLoader(GRAPHS, batch_size=2, collate_fn=as_graphs)

    wrong = OfGraphs(mlp(), dl.CPUEngine()).evaluate_loader(batches)
    [line] = caplog.messages
    caplog.clear()
    right = Counting(mlp(), dl.CPUEngine()).evaluate_loader(batches)

    assert "counts as 10 samples" in line and "self.batch_size" in line and "number of graphs" in line
    assert wrong["value"] == pytest.approx(0.5 * 10 / 12)
    assert right["value"] == pytest.approx(1 / 4) and caplog.messages == []


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize(("kind", "num_warnings"), [(OfGraphs, 1), (Counting, 0)])
def test_graphs_on_two_processes_are_warned_about_once(kind, num_warnings, capfd):
    """Not as samples that a collate_fn has dropped, nor in each epoch on each rank."""
    loaders = {"train": DataLoader(GRAPHS * 2, batch_size=2, collate_fn=as_graphs)}
    steps = [dl.BackwardCallback(), dl.OptimizerCallback()]
    train(runner=kind(), criterion=None, callbacks=steps, num_processes=2, num_epochs=2, loaders=loaders)

    shown = capfd.readouterr().err
    assert shown.count("counts as") == num_warnings
    assert "collate_fn" not in shown
