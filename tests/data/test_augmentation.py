"""Batch augmentation, compared with torchvision's on single images with the same draws."""

from collections import Counter

import pytest
import torch

from runnerkit.data import BatchNormalize, BatchRandomCrop, BatchRandomHorizontalFlip
from runnerkit.torchvision_cpu import import_torchvision

CHI_SQUARE_999 = {8: 26.12}  # 99.9 % quantile by degrees of freedom, from a table


def images(num_images, channels=3, height=7, width=5, dtype=torch.uint8):
    pixels = torch.randint(0, 256, (num_images, channels, height, width), dtype=torch.uint8)
    return pixels if dtype == torch.uint8 else pixels.to(dtype) / 255


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
@pytest.mark.parametrize(("padding", "size"), [(0, None), (2, None), (1, (8, 3)), (0, (4, 5)), (3, (13, 11))])
def test_a_crop_is_torchvisions_of_each_image(padding, size, dtype):
    """Each crop is the same window of the same padded image, bit for bit."""
    functional = import_torchvision().transforms.functional
    batch = images(9, dtype=dtype)
    height, width = size or (7, 5)

    torch.manual_seed(1)
    cropped = BatchRandomCrop(padding, size)(batch)

    torch.manual_seed(1)
    tops = torch.randint(7 + 2 * padding - height + 1, (9,)).tolist()
    lefts = torch.randint(5 + 2 * padding - width + 1, (9,)).tolist()
    for image, got, top, left in zip(batch, cropped, tops, lefts, strict=True):
        assert torch.equal(got, functional.crop(functional.pad(image, padding), top, left, height, width))
    assert cropped.dtype == dtype and cropped.is_contiguous()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_a_flip_is_torchvisions_of_each_image(p):
    """The images chosen by the draw are flipped, and the others are unchanged."""
    functional = import_torchvision().transforms.functional
    batch = images(40)

    torch.manual_seed(1)
    flipped = BatchRandomHorizontalFlip(p)(batch)

    torch.manual_seed(1)
    chosen = [draw < p for draw in torch.rand(40).tolist()]
    for image, got, is_flipped in zip(batch, flipped, chosen, strict=True):
        assert torch.equal(got, functional.hflip(image) if is_flipped else image)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_normalized_pixels_are_torchvisions(dtype):
    """Operations and their order are torchvision's, so pixels agree bit for bit."""
    functional = import_torchvision().transforms.functional
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    batch = images(6, dtype=dtype)
    before = batch.clone()

    normalized = BatchNormalize(mean, std)(batch)

    pixels = batch.float() / 255 if dtype == torch.uint8 else batch.float()
    expected = torch.stack([functional.normalize(image, mean, std) for image in pixels])
    assert torch.equal(normalized, expected)
    assert normalized.dtype == torch.float32
    assert torch.equal(batch, before), "the user's pixels are unchanged"


def test_each_image_has_a_window_of_its_own_and_all_are_equally_likely():
    """Windows of 1,800 images are uniform over 3 x 3 positions: a chi-square test at 0.1 %, with a fixed seed."""
    place = torch.arange(9.0).reshape(1, 1, 3, 3)  # the value of a one-pixel window is its position

    cropped = BatchRandomCrop(padding=0, size=(1, 1))(place.expand(1800, 1, 3, 3))

    counts = Counter(cropped.flatten().tolist())
    assert sum((counts[float(index)] - 200) ** 2 / 200 for index in range(9)) < CHI_SQUARE_999[8]


def test_so_many_images_are_flipped():
    """With p = 0.25, a quarter of 4,000 images is flipped, within four standard deviations of 27.4, with a fixed
    seed."""
    image = torch.tensor([0.0, 1.0]).reshape(1, 1, 1, 2)

    flipped = BatchRandomHorizontalFlip(0.25)(image.expand(4000, 1, 1, 2))

    assert abs(flipped[..., 0].sum().item() - 1000) < 4 * 27.4


def test_draws_depend_on_the_number_of_images_only():
    """Pixels, image size and padding do not change the random numbers drawn afterwards."""
    after = []
    for padding, batch in ((1, images(8)), (4, images(8, channels=1, height=32, width=32, dtype=torch.float32))):
        torch.manual_seed(3)
        torch.nn.Sequential(BatchRandomCrop(padding), BatchRandomHorizontalFlip())(batch)
        after.append(torch.rand(()))

    assert after[0] == after[1]


def test_in_evaluation_nothing_is_random():
    """Evaluation takes the middle window, does not flip, and draws no random numbers."""
    batch, state = images(4), torch.get_rng_state()

    assert torch.equal(BatchRandomCrop(3).eval()(batch), batch)
    assert torch.equal(BatchRandomCrop(0, (5, 3)).eval()(batch), batch[:, :, 1:6, 1:4])
    assert torch.equal(BatchRandomHorizontalFlip(1.0).eval()(batch), batch)
    assert torch.equal(torch.get_rng_state(), state)


def test_normalization_leaves_nothing_in_a_checkpoint():
    """As a layer of a model, it adds no weights and moves to the model's device."""
    layer = BatchNormalize([0.5], [0.5]).to("meta")

    assert layer.state_dict() == {} and list(layer.parameters()) == []
    assert layer.mean.device == layer.std.device == torch.device("meta")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BatchRandomCrop(-1), ValueError, "padding must be >= 0, got -1"),
        (lambda: BatchRandomCrop(1, (0, 3)), ValueError, r"two numbers >= 1, got \(0, 3\)"),
        (lambda: BatchRandomCrop(1, (10, 3))(images(2)), ValueError, r"\(10, 3\) does not fit .* padded to \(9, 7\)"),
        (lambda: BatchRandomHorizontalFlip(1.1), ValueError, r"p must be in \[0, 1\], got 1.1"),
        (lambda: BatchNormalize([0.5], [0.5, 0.5]), ValueError, "one number per channel, got 1 and 2"),
        (lambda: BatchNormalize([0.5], [0.0]), ValueError, r"std must be > 0, got \[0.0\]"),
        (lambda: BatchNormalize([0.5], [0.5])(images(2)), ValueError, "has 1 channels, but the images have 3"),
        (
            lambda: BatchNormalize([0.5] * 3, [0.5] * 3)(images(2).long()),
            TypeError,
            "uint8 or float .* got torch.int64",
        ),
        (lambda: BatchRandomCrop(1)(images(2)[0]), ValueError, r"\(N, C, H, W\), got shape \(3, 7, 5\)"),
        (lambda: BatchRandomHorizontalFlip()(torch.zeros(2, 3)), ValueError, r"got shape \(2, 3\)"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    """The error states the allowed values and the value passed."""
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_waits_for_the_device():
    """Random numbers are drawn on the GPU by its generator, whose state checkpoints contain, without
    synchronization."""
    augment = torch.nn.Sequential(
        BatchRandomCrop(2), BatchRandomHorizontalFlip(), BatchNormalize([0.5] * 3, [0.5] * 3)
    ).cuda()
    batch = images(16).cuda()
    torch.cuda.manual_seed(1)

    torch.cuda.set_sync_debug_mode("error")
    try:
        augmented = augment(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    torch.cuda.manual_seed(1)
    assert torch.equal(augment(batch), augmented)
    assert not torch.equal(augment(batch), augmented)
