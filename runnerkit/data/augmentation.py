"""Image augmentation of whole batches on their device, with an independent random draw per image.

Draws come from torch's global generator of that device. Checkpoints include its state, so a resumed run draws the same
values as an uninterrupted one. The number of draws depends only on the number of images, so chained transforms do not
affect each other. Nothing synchronizes with the device. In evaluation mode (``.eval()``) nothing is random.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BatchNormalize", "BatchRandomCrop", "BatchRandomHorizontalFlip"]


class BatchRandomCrop(nn.Module):
    """Zero padding on all sides, then a random crop per image; a center crop in evaluation mode.

    Args:
        padding: pixels on each side.
        size: height and width of the crop; None uses those of the image.

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
            images: (N, C, H, W) of any dtype.
        Returns:
            (N, C, *size) of that dtype.
        Raises:
            ValueError: the crop is larger than the padded image.
        """
        _check_images(images)
        height, width = self.size or (images.shape[2], images.shape[3])
        padded = F.pad(images, [self.padding] * 4) if self.padding else images
        num_tops, num_lefts = padded.shape[2] - height + 1, padded.shape[3] - width + 1
        if min(num_tops, num_lefts) < 1:
            padded_size = tuple(padded.shape[2:])
            raise ValueError(f"a crop of size {(height, width)} does not fit into images padded to {padded_size}")
        if not self.training:
            top, left = (num_tops - 1) // 2, (num_lefts - 1) // 2
            return padded[:, :, top : top + height, left : left + width]
        num_images, device = len(images), images.device
        tops = torch.randint(num_tops, (num_images,), device=device)
        lefts = torch.randint(num_lefts, (num_images,), device=device)
        # A view of all windows (N, C, tops, lefts, height, width); only one per image is copied.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(num_images, device=device), :, tops, lefts]


class BatchRandomHorizontalFlip(nn.Module):
    """Horizontal flip of each image with probability `p`.

    >>> BatchRandomHorizontalFlip(p=1.0)(torch.tensor([[[[1, 2, 3]]]]))
    tensor([[[[3, 2, 1]]]])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be in [0, 1], got {p}")
        self.p = p

    def forward(self, images: Tensor) -> Tensor:
        """Flip (N, C, H, W) images of any dtype."""
        _check_images(images)
        if not self.training:
            return images
        is_flipped = torch.rand(len(images), device=images.device) < self.p
        return torch.where(is_flipped[:, None, None, None], images.flip(-1), images)


class BatchNormalize(nn.Module):
    """Normalization of each channel with `mean` and `std`, after uint8 pixels are scaled to [0, 1].

    As the first layer of a model it also applies to predictions, and batches are copied to the device as bytes.

    Args:
        mean, std: one number per channel, for pixels in [0, 1].

    >>> BatchNormalize(mean=[0.5], std=[0.25])(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-2.,  2.]]]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ValueError(f"mean and std must have one number per channel, got {len(mean)} and {len(std)}")
        if min(std) <= 0:
            raise ValueError(f"std must be > 0, got {list(std)}")
        # Not saved in checkpoints: they are constructor arguments.
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Normalize.

        Args:
            images: (N, C, H, W) uint8 in [0, 255], or float in [0, 1].
        Returns:
            (N, C, H, W) float32.
        Raises:
            TypeError: the pixels are integers other than uint8, whose range is unknown.
            ValueError: the number of channels differs from that of `mean`.
        """
        _check_images(images)
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise TypeError(f"BatchNormalize expects uint8 or float pixels, got {images.dtype}")
        if images.shape[1] != len(self.mean):
            raise ValueError(f"BatchNormalize has {len(self.mean)} channels, but the images have {images.shape[1]}")
        pixels = images.float().div_(255) if images.dtype == torch.uint8 else images.float()
        return (pixels - self.mean).div_(self.std)


def _check_images(images: Tensor) -> None:
    if images.ndim != 4:
        raise ValueError(f"expected a batch of images (N, C, H, W), got shape {tuple(images.shape)}")
