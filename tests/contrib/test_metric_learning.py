"""Data sets and losses for metric learning, and MovieLens, against loops and torch's own functions."""

import itertools
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerkit import contrib, dl
from runnerkit.contrib import nn as contrib_nn


def by_loop(features, labels, kind):
    """Select triplets with loops over samples, as sets of positions."""
    places = range(len(labels))
    distances = torch.cdist(features, features)
    if kind == "all":
        triplets = itertools.product(places, repeat=3)
        return {(a, p, n) for a, p, n in triplets if a < p and labels[a] == labels[p] != labels[n]}
    triplets = set()
    for anchor in places:
        alike = [each for each in places if labels[each] == labels[anchor] and each != anchor]
        others = [each for each in places if labels[each] != labels[anchor]]
        near = distances[anchor].__getitem__
        triplets.add((anchor, max(alike, key=near), min(others, key=near)))
    return triplets


def selected(sampler, features, labels):
    """Return a sampler's triplets as positions, by features that tell them."""
    parts = sampler.sample(features, labels)
    place = {tuple(row.tolist()): index for index, row in enumerate(features)}
    return {tuple(place[tuple(row.tolist())] for row in rows) for rows in zip(*parts, strict=True)}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(2, 4), min_size=2, max_size=4))
def test_triplets_equal_those_of_loops(seed, sizes):
    """Hard ones and all, for classes of different sizes in any order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([label for label, size in enumerate(sizes) for _ in range(size)])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    features = torch.randn(len(labels), 3, generator=generator)

    assert selected(dl.HardTripletsSampler(), features, labels) == by_loop(features, labels.tolist(), "hard")
    assert selected(dl.AllTripletsSampler(), features, labels.tolist()) == by_loop(features, labels.tolist(), "all")
    some = selected(dl.AllTripletsSampler(max_output_triplets=3), features, labels)
    assert len(some) == 3 and some < by_loop(features, labels.tolist(), "all") | {None}


def test_directions_are_compared_if_wanted():
    """Lengths do not count."""
    features, labels = torch.tensor([[1.0, 0.0], [9.0, 0.1], [0.0, 1.0], [0.1, 9.0]]), [0, 0, 1, 1]
    unit = torch.nn.functional.normalize(features)

    assert selected(dl.HardTripletsSampler(norm_required=True), features, labels) == by_loop(unit, labels, "hard")


def test_the_loss_has_torchs_value_and_gradient():
    """It is torch's triplet margin loss of the selected triplets."""
    features, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 1, 1, 2, 2])
    mine, theirs = (features.clone().requires_grad_() for _ in range(2))
    sampler = dl.HardTripletsSampler()

    loss = contrib.TripletMarginLossWithSampler(margin=0.5, sampler_inbatch=sampler)(mine, labels)
    triplets = sorted(by_loop(features, labels.tolist(), "hard"))
    expected = torch.nn.TripletMarginLoss(margin=0.5)(*(theirs[list(part)] for part in zip(*triplets, strict=True)))
    loss.backward()
    expected.backward()

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("mode", ["macro", "micro", "weighted"])
@pytest.mark.parametrize(("loss", "metric"), [(contrib.IoULoss, "iou"), (contrib.DiceLoss, "dice")])
def test_overlap_losses_are_one_minus_the_metric(loss, metric, mode):
    """The metric objects are the reference; its gradient exists."""
    from runnerkit import metrics

    generator = torch.Generator().manual_seed(0)
    outputs = torch.rand(4, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = (torch.rand(4, 3, 5, generator=generator) > 0.5).double()
    weights = [0.2, 0.3, 0.5]
    kind = {"iou": metrics.IOUMetric, "dice": metrics.DiceMetric}[metric](weights=weights)
    kind.update(outputs, targets)

    value = loss(average=mode, weights=weights if mode == "weighted" else None)(outputs, targets)
    value.backward()

    assert 1 - value.item() == pytest.approx(kind.compute_key_value()[f"{metric}/_{mode}"], abs=1e-7)
    assert outputs.grad.abs().sum() > 0


MODES = "DiceLoss: average must be 'macro', 'micro', or 'weighted' with weights="


def hard_triplets(labels):
    return dl.HardTripletsSampler().sample(torch.randn(4, 2), labels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: contrib.DiceLoss(average="mean"), MODES),
        (lambda _: contrib.DiceLoss(average="weighted"), MODES),
        (lambda _: contrib.DiceLoss(weights=[1.0]), MODES),
        (lambda _: contrib.IoULoss()(torch.zeros(2, 3), torch.zeros(2, 1)), "outputs and masks of one shape"),
        (lambda _: hard_triplets([0, 0, 0, 0]), "two classes and two samples of each: use BatchBalanceClassSampler"),
        (lambda _: hard_triplets([0, 0, 0, 1]), "two classes and two samples of each"),
        (lambda _: hard_triplets([0, 1]), r"features \(N, D\) and labels \(N,\), got \(4, 2\) and \(2,\)"),
        (lambda root: contrib.MnistMLDataset(root, train=False), "is for training: use MnistQGDataset"),
        (lambda root: contrib.MnistQGDataset(root, gallery_fraq=1.5), r"gallery_fraq must be in \(0, 1\), got 1.5"),
    ],
)
def test_wrong_input_is_refused(mnist, make, message):
    """The error says what was expected."""
    with pytest.raises(ValueError, match=message):
        make(mnist)


@pytest.fixture
def mnist(tmp_path):
    """Write 20 training and 20 test images, each filled with its index; classes 0 to 9 in turn."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        pixels = bytes(index for index in range(20) for _ in range(28 * 28))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, 20, 28, 28) + pixels)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, 20) + bytes([*range(10)] * 2))
    return tmp_path


def test_mnist_without_a_transform_is_ready_for_a_model(mnist):
    """Pixels are divided by 255 and normalized; `normalize=None` leaves them so."""
    image, target = contrib.MNIST(mnist)[13]
    plain, _ = contrib.MNIST(mnist, normalize=None)[13]
    array, _ = contrib.MNIST(mnist, transform=lambda each: each)[13]

    assert image.shape == (1, 28, 28) and target == 3
    torch.testing.assert_close(image, torch.full((1, 28, 28), (13 / 255 - 0.1307) / 0.3081))
    torch.testing.assert_close(plain, torch.full((1, 28, 28), 13 / 255))
    assert array.shape == (28, 28) and array.dtype == "uint8"


def test_mnist_for_metric_learning_has_other_digits_in_training(mnist):
    """Training has the digits 0 to 4; queries and gallery have 5 to 9, and each sample is one of them."""
    train, test = contrib.MnistMLDataset(mnist), contrib.MnistQGDataset(mnist, gallery_fraq=0.3, normalize=None)

    assert train.get_labels() == [0, 1, 2, 3, 4] * 2
    assert [each["targets"] for each in test] == [5, 6, 7, 8, 9] * 2
    assert [bool(each["is_query"]) for each in test] == [True] * 7 + [False] * 3
    assert (test.query_size, test.gallery_size) == (7, 3)
    torch.testing.assert_close(test[9]["features"], torch.full((1, 28, 28), 19 / 255))


@pytest.mark.parametrize("place", ["ml-100k", "MovieLens/raw/ml-100k"])
def test_movielens_reads_the_ratings(tmp_path, place):
    """Both parts have all users and movies; small ratings are dropped on request."""
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / "ua.base").write_text("1\t2\t5\t874965758\n2\t1\t3\t888550871\n")
    (folder / "ua.test").write_text("1\t3\t1\t875072173\n3\t2\t4\t891352748\n")

    train, test = contrib.MovieLens(tmp_path), contrib.MovieLens(tmp_path, train=False, min_rating=2.0)

    assert train.data.tolist() == [[0, 5, 0], [3, 0, 0], [0, 0, 0]]
    assert test.data.tolist() == [[0, 0, 0], [0, 0, 0], [0, 4, 0]]
    assert len(test) == 3 and test[2].tolist() == [0, 4, 0]


def test_layers_are_in_one_namespace_with_torchs():
    """Layers equal torch's functions."""
    x = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))

    assert issubclass(contrib_nn.Lambda, contrib_nn.Module)
    torch.testing.assert_close(contrib.GlobalAvgPool2d()(x), torch.nn.functional.adaptive_avg_pool2d(x, 1))
    torch.testing.assert_close(contrib.GlobalMaxPool2d()(x), torch.nn.functional.adaptive_max_pool2d(x, 1))
    torch.testing.assert_close(contrib.GeM2d(p=1.0)(x), contrib.GlobalAvgPool2d()(x))
    torch.testing.assert_close(contrib.GeM2d(p=float("inf"))(x), contrib.GlobalMaxPool2d()(x))
    torch.testing.assert_close(
        contrib.GeM2d(p=3.0, p_trainable=True)(x), torch.nn.functional.lp_pool2d(x, 3.0, (4, 5)) / 20 ** (1 / 3)
    )
    assert contrib.GlobalConcatPool2d()(x).shape == (2, 6, 1, 1)
    torch.testing.assert_close(contrib.Normalize(dim=1)(x).norm(dim=1), torch.ones(2, 4, 5))
    noisy = contrib.GaussianNoise(stddev=2.0)(torch.zeros(10_000))
    assert noisy.std() == pytest.approx(2.0, rel=0.05)
