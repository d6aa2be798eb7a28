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

    from_array, from_tensor = transform(image), transform(torch.from_numpy(image))

    assert torch.equal(from_array, reference)
    assert torch.equal(from_tensor, reference)
    assert from_array.dtype == torch.float32
    assert from_array.is_contiguous()


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "F"])
def test_pil_images_become_what_torchvision_makes_of_them(mode):
    """Bit, byte and float images are equal."""
    image = Image.fromarray(pixels(6, 4, 3)).convert(mode)
    reference = import_torchvision().transforms.functional.to_tensor(image)

    tensor = ToTensor()(image)

    assert torch.equal(tensor, reference)


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
    """(x - mean) / std agrees to one rounding: torchvision does the same operations in place, in the same order."""
    image = ImageToTensor()(pixels(5, 7, 3))
    reference = import_torchvision().transforms.functional.normalize(image, MEAN, STD)

    normalized = NormalizeImage(mean=MEAN, std=STD)(image)

    torch.testing.assert_close(normalized, reference, rtol=1e-6, atol=1e-6)


def test_one_mean_serves_every_channel():
    """A number, or a list of one, applies to all channels."""
    image = torch.rand(3, 4, 4)

    assert torch.equal(NormalizeImage(0.5, 0.25)(image), (image - 0.5) / 0.25)
    assert torch.equal(NormalizeImage([0.5], [0.25])(image), (image - 0.5) / 0.25)


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 32, 32, 3), (32,), (32, 32, 0)])
def test_what_is_no_image_is_refused_with_its_shape(shape):
    """(C, H, W) and whole batches are the usual mistakes."""
    image = np.zeros(shape, dtype=np.uint8)

    with pytest.raises(ValueError, match=r"\(H, W\) or \(H, W, C\).*got \(") as caught:
        ImageToTensor()(image)

    assert str(shape) in str(caught.value)


def test_pixels_of_unknown_range_are_refused_with_their_dtype():
    """ImageToTensor takes only uint8, and ToTensor cannot know the largest value of an int32."""
    with pytest.raises(TypeError, match=r"expects uint8 pixels, got torch\.float32"):
        ImageToTensor()(np.zeros((4, 4), dtype=np.float32))

    with pytest.raises(TypeError, match=r"got torch\.int32"):
        ToTensor()(np.zeros((4, 4), dtype=np.int32))


@pytest.mark.parametrize(
    ("image", "error", "words"),
    [
        (torch.zeros(3, 4, 4, dtype=torch.uint8), TypeError, "got torch.uint8; put ImageToTensor"),
        (np.zeros((3, 4, 4)), TypeError, "got ndarray"),
        (torch.zeros(1, 4, 4), ValueError, r"expects \(3, H, W\), got \(1, 4, 4\)"),
        (torch.zeros(3, 4), ValueError, r"expects \(3, H, W\), got \(3, 4\)"),
    ],
    ids=["bytes", "array", "channels", "dimensions"],
)
def test_normalizing_the_wrong_thing_is_refused(image, error, words):
    """A list with too few means would broadcast silently."""
    normalize = NormalizeImage(MEAN, STD)

    with pytest.raises(error, match=words):
        normalize(image)


def test_wrong_arguments_are_refused_at_once():
    """The constructor raises the error, not a worker process later."""
    with pytest.raises(ValueError, match="mean has 3 numbers and std 1"):
        NormalizeImage(MEAN, [0.5])

    with pytest.raises(ValueError, match="std must be positive"):
        NormalizeImage(MEAN, [0.5, 0.0, 0.5])

    with pytest.raises(TypeError, match=r"transforms\[1\] must be callable, got list"):
        Compose([ToTensor(), [0.5]])


@pytest.mark.parametrize("first", [ImageToTensor(), ToTensor()], ids=["ImageToTensor", "ToTensor"])
def test_transforms_survive_pickling(first):
    """Worker processes receive transforms by pickle."""
    transform = Compose([first, NormalizeImage(MEAN, STD)])
    image = pixels(4, 4, 3)

    copy = pickle.loads(pickle.dumps(transform))

    assert torch.equal(copy(image), transform(image))
