"""Tests of image, figure, histogram and PR curve conversion, compared with NumPy and scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_score, recall_score
from torch import Tensor

from runnerkit.loop.media import histogram_of, image_of, image_of_figure, pr_curve_of


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_tensor_and_an_array_of_one_picture_are_the_same_image(channels: int) -> None:
    """A (C, H, W) tensor and an (H, W, C) array give the same image; one channel is gray."""
    levels = np.arange(2 * 5 * channels, dtype=np.uint8).reshape(2, 5, channels)
    expected = levels[..., 0] if channels == 1 else levels

    for image in (levels, torch.from_numpy(levels).permute(2, 0, 1)):
        np.testing.assert_array_equal(image_of(image), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_floats_are_shares_of_white(dtype: torch.dtype) -> None:
    """Floats in [0, 1] map to [0, 255]; values outside are clipped and NaN is black; views with gradients are fine."""
    values = torch.tensor([[0.0, 0.25, 1.0, -3.0, 7.0, float("inf"), float("-inf"), float("nan")]], dtype=dtype)

    assert image_of(values.requires_grad_().flip(1)).tolist() == [[0, 0, 255, 255, 0, 255, 64, 0]]


INTEGERS = {
    "int64": torch.tensor([[0, 300, -5]]),
    "int16": np.array([[0, 300, -5]], dtype=np.int16),
    "reversed": np.array([[-5, 300, 0]], dtype=np.int16)[:, ::-1],
    "uint16": np.array([[0, 300, 0]], dtype=np.uint16),
    "uint8": torch.tensor([[0, 255, 0]], dtype=torch.uint8),
    "bool": torch.tensor([[False, True, False]]),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_levels_and_bools_black_and_white(name: str) -> None:
    """Integers are clipped to [0, 255] instead of wrapping around; the image is a copy, as a logger may write later."""
    image = image_of(given := INTEGERS[name])
    given[...] = 0

    assert image.tolist() == [[0, 255, 0]]


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (torch.zeros(8, 3, 4, 4), r"a tensor of shape \(C, H, W\) or \(H, W\) with C = 1, 3 or 4, got \(8, 3, 4, 4\)"),
        (torch.zeros(8, 9, 3), r"got \(8, 9, 3\)"),
        (np.zeros((3, 8, 9)), r"an array of shape \(H, W, C\) or \(H, W\) with C = 1, 3 or 4, got \(3, 8, 9\)"),
        (torch.zeros(4), r"got \(4,\).*make_grid"),
        (torch.zeros(3, 0, 4), r"got \(3, 0, 4\)"),
    ],
)
def test_another_shape_is_refused(image: Tensor | np.ndarray, words: str) -> None:
    """A wrong shape raises an error with the expected and the given shape."""
    with pytest.raises(ValueError, match=words):
        image_of(image)


def test_what_is_no_image_figure_or_tensor_is_named() -> None:
    """Objects of another type, such as a path or a list, raise a TypeError."""
    with pytest.raises(TypeError, match="an image is a tensor or a NumPy array, got str"):
        image_of("cat.png")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(TypeError, match="a figure must be a Matplotlib Figure, got ndarray"):
        image_of_figure(np.zeros((2, 2)))  # type: ignore[arg-type]  # the mistake
    with pytest.raises(TypeError, match="values must be a tensor or a NumPy array, got list"):
        histogram_of([1.0])  # type: ignore[arg-type]  # the mistake


def test_a_figure_is_drawn_and_left_as_it_was() -> None:
    """A figure is rendered at its own size and color and keeps its canvas."""
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(3, 2), dpi=50, facecolor="red")
    canvas = figure.canvas

    image = image_of_figure(figure)

    assert image.shape == (100, 150, 3)
    assert image[0, 0].tolist() == [255, 0, 0]
    assert figure.canvas is canvas


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_histogram_is_numpys(dtype: torch.dtype) -> None:
    """Edges and counts equal those of numpy.histogram."""
    values = (1000 * torch.randn(7, 333, generator=torch.Generator().manual_seed(0))).to(dtype)

    histogram = histogram_of(values)

    counts, edges = np.histogram(values.double().numpy(), bins=64)
    assert histogram is not None
    np.testing.assert_allclose(histogram.edges, edges, rtol=1e-12)
    if dtype.is_floating_point and dtype is not torch.bfloat16:
        np.testing.assert_array_equal(histogram.counts, counts)
    else:  # values on an edge may fall in either bin
        assert histogram.counts.sum() == counts.sum() and abs(histogram.counts - counts).sum() <= 8


@pytest.mark.parametrize("value", [0.0, 3.0, 1e20, -0.25])
def test_values_that_are_all_the_same_have_a_histogram(value: float) -> None:
    """Equal values all fall in one bin of positive width."""
    histogram = histogram_of(np.full(10, value))

    assert histogram is not None
    assert histogram.counts.max() == 10 and (np.diff(histogram.edges) > 0).all()
    (index,) = histogram.counts.nonzero()[0]
    assert histogram.edges[index] <= value <= histogram.edges[index + 1]


def test_what_is_not_finite_is_in_no_histogram() -> None:
    """Non-finite values are ignored; without finite values there is no histogram."""
    bad = [float("nan"), float("inf"), float("-inf")]

    some = histogram_of(torch.tensor([1.0, *bad, 2.0]))

    assert some is not None and some.counts.sum() == 2 and some.edges[[0, -1]].tolist() == [1.0, 2.0]
    assert histogram_of(torch.tensor(bad)) is None
    assert histogram_of(torch.tensor([])) is None


def test_a_pr_curve_is_scikit_learns() -> None:
    """Counts, precision and recall equal scikit-learn's; scores equal to the threshold count as positive."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.cat([torch.rand(300, generator=generator), torch.arange(127) / 126, torch.tensor([0.0, 1.0])])
    drawn = torch.rand(len(scores), generator=generator) < scores

    for targets in (drawn, torch.zeros_like(drawn), torch.ones_like(drawn)):  # one class divides by nothing
        curve = pr_curve_of(scores.reshape(3, -1), targets.reshape(3, -1))

        assert len(curve.thresholds) == 127
        for index, threshold in list(enumerate(curve.thresholds))[::9]:
            taken = scores.double().numpy() >= threshold
            assert curve.true_positives[index] == (taken & targets.numpy()).sum()
            assert curve.false_positives[index] == (taken & ~targets.numpy()).sum()
            assert curve.true_negatives[index] == (~taken & ~targets.numpy()).sum()
            assert curve.false_negatives[index] == (~taken & targets.numpy()).sum()
            assert curve.precision[index] == pytest.approx(precision_score(targets, taken, zero_division=0.0))
            assert curve.recall[index] == pytest.approx(recall_score(targets, taken, zero_division=0.0))


@pytest.mark.parametrize(
    ("scores", "targets", "words"),
    [
        ([0.5, 2.0], [0, 1], r"probabilities in \[0, 1\]: pass logits.sigmoid\(\)"),
        ([0.5, float("nan")], [0, 1], r"probabilities in \[0, 1\]"),
        ([0.5, 0.1], [0, 2], "with several classes, draw one against the rest"),
        ([0.5, 0.1], [0, 1, 1], r"the same shape, got \(2,\) and \(3,\)"),
    ],
)
def test_what_has_no_pr_curve_is_refused(scores: list[float], targets: list[int], words: str) -> None:
    """Logits, NaN, multi-class targets and different shapes raise an error."""
    with pytest.raises(ValueError, match=words):
        pr_curve_of(torch.tensor(scores), torch.tensor(targets))
