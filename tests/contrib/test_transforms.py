"""Transforms: equal to torchvision's pixels, with checked shapes, and picklable."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from runnerkit.contrib import Compose, ImageToTensor, NormalizeImage, ToTensor
from runnerkit.torchvision_cpu import import_torchvision

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


def pixels(*shape):
    return np.random.default_rng(0).integers(0, 256, size=shape, dtype=np.uint8)


@pytest.mark.parametrize("transform", [ImageToTensor(), ToTensor()], ids=["ImageToTensor", "ToTensor"])
@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4)])
def test_pixels_become_what_torchvision_makes_of_them(transform, shape):
    """Results are equal bit for bit, for arrays and tensors, in grey and in color."""
    image = pixels(*shape)
    reference = import_torchvision().transforms.functional.to_tensor(image)

    for result in (transform(image), transform(torch.from_numpy(image))):
        assert torch.equal(result, reference)
        assert result.dtype == torch.float32 and result.is_contiguous()


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "F"])
def test_pil_images_become_what_torchvision_makes_of_them(mode):
    """Bit, byte and float images are equal."""
    image = Image.fromarray(pixels(6, 4, 3)).convert(mode)

    assert torch.equal(ToTensor()(image), import_torchvision().transforms.functional.to_tensor(image))


def test_flipped_and_read_only_arrays_are_taken():
    """torch refuses negative strides, as in flipped images, and warns about read-only memory, as from PIL."""
    image = pixels(4, 4, 3)
    image.flags.writeable = False

    flipped = ImageToTensor()(image[:, ::-1])

    assert torch.equal(flipped, ImageToTensor()(image).flip(2))


def test_the_image_that_came_is_left_alone():
    """Scaling makes a copy."""
    image = torch.from_numpy(pixels(4, 4))
    before = image.clone()

    Compose([ImageToTensor(), NormalizeImage(0.5, 0.5)])(image)

    assert torch.equal(image, before)


def test_normalizing_equals_torchvision():
    """(x - mean) / std agrees to one rounding; a number, or a list of one, applies to all channels."""
    image = ImageToTensor()(pixels(5, 7, 3))
    reference = import_torchvision().transforms.functional.normalize(image, MEAN, STD)

    torch.testing.assert_close(NormalizeImage(mean=MEAN, std=STD)(image), reference, rtol=1e-6, atol=1e-6)
    assert torch.equal(NormalizeImage(0.5, 0.25)(image), (image - 0.5) / 0.25)
    assert torch.equal(NormalizeImage([0.5], [0.25])(image), (image - 0.5) / 0.25)


NORMALIZE = NormalizeImage(MEAN, STD)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ImageToTensor()(pixels(3, 32, 32)), ValueError, r"\(H, W\) or \(H, W, C\).*got \(3, 32, 32\)"),
        (lambda: ImageToTensor()(pixels(2, 32, 32, 3)), ValueError, r"\(H, W, C\).*got \(2, 32, 32, 3\)"),
        (lambda: ImageToTensor()(pixels(32)), ValueError, r"\(H, W, C\).*got \(32,\)"),
        (lambda: ImageToTensor()(pixels(32, 32, 0)), ValueError, r"\(H, W, C\).*got \(32, 32, 0\)"),
        (lambda: ImageToTensor()(np.zeros((4, 4), dtype=np.float32)), TypeError, r"expects uint8 .* torch\.float32"),
        (lambda: ToTensor()(np.zeros((4, 4), dtype=np.int32)), TypeError, r"got torch\.int32"),
        (lambda: NORMALIZE(torch.zeros(3, 4, 4, dtype=torch.uint8)), TypeError, "got torch.uint8; put ImageToTensor"),
        (lambda: NORMALIZE(np.zeros((3, 4, 4))), TypeError, "got ndarray"),
        (lambda: NORMALIZE(torch.zeros(1, 4, 4)), ValueError, r"expects \(3, H, W\), got \(1, 4, 4\)"),
        (lambda: NORMALIZE(torch.zeros(3, 4)), ValueError, r"expects \(3, H, W\), got \(3, 4\)"),
        (lambda: NormalizeImage(MEAN, [0.5]), ValueError, "mean has 3 numbers and std 1"),
        (lambda: NormalizeImage(MEAN, [0.5, 0.0, 0.5]), ValueError, "std must be positive"),
        (lambda: Compose([ToTensor(), [0.5]]), TypeError, r"transforms\[1\] must be callable, got list"),
    ],
)
def test_the_wrong_thing_is_refused(make, error, words):
    """Whole batches, other layouts, dtypes of unknown range, and lists with too few means, which would broadcast."""
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("first", [ImageToTensor(), ToTensor()], ids=["ImageToTensor", "ToTensor"])
def test_transforms_survive_pickling(first):
    """Worker processes receive transforms by pickle."""
    transform = Compose([first, NormalizeImage(MEAN, STD)])
    image = pixels(4, 4, 3)

    copy = pickle.loads(pickle.dumps(transform))

    assert torch.equal(copy(image), transform(image))
