"""Case b in runnerkit with TensorLoader and batch augmentation: whole batches are cropped, flipped and normalized."""

import torch
from torch import nn

from benchmarks.cnn import ours, work
from runnerkit import dl


def train(images: dict[str, work.Images]) -> work.Metrics:
    loaders = {
        key: dl.TensorLoader(
            torch.from_numpy(each.pixels).unsqueeze(1),
            torch.from_numpy(each.targets).long(),
            batch_size=work.BATCH_SIZE,
            shuffle=key == "train",
        )
        for key, each in images.items()
    }
    augment = nn.Sequential(
        dl.BatchRandomCrop(padding=work.PADDING),
        dl.BatchRandomHorizontalFlip(),
        dl.BatchNormalize([work.MEAN], [work.STD]),
    )
    return ours.fit(work.make_model(images), loaders, dl.BatchTransformCallback(augment, input_key="features"))


if __name__ == "__main__":
    work.main(train)
