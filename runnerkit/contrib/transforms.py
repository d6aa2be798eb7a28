"""Picklable transforms of single images, from pixels to tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Compose", "ImageToTensor", "NormalizeImage", "ToTensor"]

_MAX_CHANNELS = 4  # RGBA; a larger last dimension is the width of a (C, H, W) image


class Compose:
    """A sequence of transforms applied in order.

    >>> transform = Compose([ImageToTensor(), NormalizeImage(mean=[0.5], std=[0.5])])
    >>> transform(np.full((28, 28), 255, dtype=np.uint8)).amax()
    tensor(1.)
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        for index, transform in enumerate(transforms):
            if not callable(transform):
                raise TypeError(f"transforms[{index}] must be callable, got {type(transform).__name__}")
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ImageToTensor:
    """Conversion of (H, W) or (H, W, C) uint8 pixels, from NumPy or torch, to (C, H, W) float32 in [0, 1].

    >>> ImageToTensor()(np.zeros((32, 48, 3), dtype=np.uint8)).shape
    torch.Size([3, 32, 48])
    """

    def __call__(self, image: np.ndarray[Any, Any] | Tensor) -> Tensor:
        """Convert `image`.

        Raises:
            TypeError: the pixels are not uint8.
            ValueError: the shape is neither (H, W) nor (H, W, C) with C <= 4.
        """
        pixels = _as_chw(image)
        if pixels.dtype != torch.uint8:
            raise TypeError(f"ImageToTensor expects uint8 pixels, got {pixels.dtype}; ToTensor accepts floats, too")
        return pixels.to(torch.float32).div_(255)


class ToTensor:
    """Conversion of a PIL image, an array or a tensor, (H, W) or (H, W, C), to (C, H, W) float32.

    uint8 is scaled to [0, 1], bool becomes 0 and 1, and floats keep their values, as in torchvision.

    >>> ToTensor()(np.full((2, 2), 51, dtype=np.uint8))
    tensor([[[0.2000, 0.2000],
             [0.2000, 0.2000]]])
    """

    def __call__(self, image: Any) -> Tensor:
        """Convert `image`.

        Raises:
            TypeError: the pixels are integers other than uint8, whose range is unknown.
            ValueError: the shape is neither (H, W) nor (H, W, C) with C <= 4.
        """
        pixels = _as_chw(image)
        if pixels.dtype == torch.uint8:
            return pixels.to(torch.float32).div_(255)
        if pixels.dtype == torch.bool or pixels.is_floating_point():
            return pixels.to(torch.float32)
        raise TypeError(f"ToTensor expects uint8, bool or float pixels, got {pixels.dtype}; scale them to [0, 1] first")


class NormalizeImage:
    """Normalization of each channel of a (C, H, W) float tensor with `mean` and `std`.

    Args:
        mean: one number per channel, or one for all.
        std: likewise; positive.

    >>> NormalizeImage(mean=[0.0, 0.5], std=[1.0, 0.5])(torch.ones(2, 4, 4))[:, 0, 0]
    tensor([1., 1.])
    """

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        self.mean = torch.as_tensor(mean, dtype=torch.float32).reshape(-1, 1, 1)
        self.std = torch.as_tensor(std, dtype=torch.float32).reshape(-1, 1, 1)
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; pass the same number of both")
        if not bool((self.std > 0).all()):
            raise ValueError(f"std must be positive in every channel, got {std}")

    def __call__(self, image: Tensor) -> Tensor:
        """Normalize `image`.

        Raises:
            TypeError: `image` is not a float tensor.
            ValueError: the shape is not (C, H, W), or C differs from the length of `mean`.
        """
        if not isinstance(image, Tensor) or not image.is_floating_point():
            kind = str(image.dtype) if isinstance(image, Tensor) else type(image).__name__
            raise TypeError(f"NormalizeImage expects a float tensor, got {kind}; put ImageToTensor() before it")
        if image.ndim != 3 or len(self.mean) not in (1, image.shape[0]):
            expected = "C" if len(self.mean) == 1 else str(len(self.mean))
            raise ValueError(f"NormalizeImage expects ({expected}, H, W), got {tuple(image.shape)}")
        return (image - self.mean.to(image)) / self.std.to(image)


def _as_chw(image: Any) -> Tensor:
    """Return an image as a contiguous (C, H, W) tensor of its own dtype."""
    # Copy, since torch cannot share PIL's read-only arrays or the negative strides of flipped ones.
    pixels = image if isinstance(image, Tensor) else torch.tensor(np.ascontiguousarray(image))
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or not 1 <= pixels.shape[2] <= _MAX_CHANNELS:
        shape = tuple(pixels.shape)
        raise ValueError(f"expected an image (H, W) or (H, W, C) with C <= {_MAX_CHANNELS}, got {shape}")
    return pixels.permute(2, 0, 1).contiguous()
