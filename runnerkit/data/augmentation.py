"""Image augmentation of whole batches, on the device of the batch, each image its own draw.

Draws come from torch's global generator of that device, which a checkpoint holds: a resumed run draws what the
uninterrupted one draws. The number of draws depends on the number of images only, so that transforms in a row do not
disturb each other. Nothing waits for the device. In evaluation mode (``.eval()``) nothing is random.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BatchRandomCrop(nn.Module):
    """Pad each image with zeros all around and cut a window out, at a place of its own; in evaluation the middle one.

    Args:
        padding: pixels on each side.
        size: height and width of the window; None is the image's.

    >>> BatchRandomCrop(padding=4)(torch.zeros(8, 3, 32, 32)).shape
    torch.Size([8, 3, 32, 32])
    """

    def __init__(self, padding: int, size: tuple[int, int] | None = None) -> None:
        super().__init__()
        if padding < 0:
            raise ValueError(f"padding must be >= 0, got {padding}")
        if size is not None and min(size) < 1:
            raise ValueError(f"size must be two numbers >= 1, got {size}")
        self.padding = padding
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        """Crop.

        Args:
            images: (N, C, H, W) of any type.
        Returns:
            (N, C, *size) of that type.
        Raises:
            ValueError: the window is larger than the padded image.
        """
        _check_images(images)
        height, width = self.size or (images.shape[2], images.shape[3])
        padded = F.pad(images, [self.padding] * 4) if self.padding else images
        num_tops, num_lefts = padded.shape[2] - height + 1, padded.shape[3] - width + 1
        if min(num_tops, num_lefts) < 1:
            padded_size = tuple(padded.shape[2:])
            raise ValueError(f"a window of {(height, width)} does not fit into images padded to {padded_size}")
        if not self.training:
            top, left = (num_tops - 1) // 2, (num_lefts - 1) // 2
            return padded[:, :, top : top + height, left : left + width]
        num_images, device = len(images), images.device
        tops = torch.randint(num_tops, (num_images,), device=device)
        lefts = torch.randint(num_lefts, (num_images,), device=device)
        # All windows as a view (N, C, tops, lefts, height, width), of which one of each image is copied.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(num_images, device=device), :, tops, lefts]


class BatchRandomHorizontalFlip(nn.Module):
    """Mirror each image, left to right, with probability `p`.

    >>> BatchRandomHorizontalFlip(p=1.0)(torch.tensor([[[[1, 2, 3]]]]))
    tensor([[[[3, 2, 1]]]])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be in [0, 1], got {p}")
        self.p = p

    def forward(self, images: Tensor) -> Tensor:
        """Flip (N, C, H, W) images of any type."""
        _check_images(images)
        if not self.training:
            return images
        is_flipped = torch.rand(len(images), device=images.device) < self.p
        return torch.where(is_flipped[:, None, None, None], images.flip(-1), images)


class BatchNormalize(nn.Module):
    """Subtract `mean` and divide by `std`, channel by channel; uint8 pixels are scaled to [0, 1] before.

    As the first layer of a model it also serves predictions, and bytes travel to the device instead of floats.

    Args:
        mean, std: one number for each channel, of pixels in [0, 1].

    >>> BatchNormalize(mean=[0.5], std=[0.25])(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-2.,  2.]]]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ValueError(f"mean and std must be of the same channels, got {len(mean)} and {len(std)}")
        if min(std) <= 0:
            raise ValueError(f"std must be > 0, got {list(std)}")
        # Not part of a checkpoint: they are arguments.
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Normalize.

        Args:
            images: (N, C, H, W) uint8 in [0, 255], or float in [0, 1].
        Returns:
            (N, C, H, W) float32.
        Raises:
            TypeError: the pixels are wider integers, whose range is unknown.
            ValueError: there are more or fewer channels than means.
        """
        _check_images(images)
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise TypeError(f"BatchNormalize expects uint8 or float pixels, got {images.dtype}")
        if images.shape[1] != len(self.mean):
            raise ValueError(f"BatchNormalize has {len(self.mean)} channels, the images {images.shape[1]}")
        pixels = images.float().div_(255) if images.dtype == torch.uint8 else images.float()
        return (pixels - self.mean).div_(self.std)


def _check_images(images: Tensor) -> None:
    if images.ndim != 4:
        raise ValueError(f"expected a batch of images (N, C, H, W), got shape {tuple(images.shape)}")
