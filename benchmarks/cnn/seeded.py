"""Case b in raw PyTorch, with crops and flips that do not depend on the number of processes, as in runnerkit."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.cnn import raw, work


class Seeded(Dataset[tuple[Tensor, int]]):
    """Images that seed torch's generator before each sample, and restore it because the model uses it too."""

    def __init__(self, images: work.Images) -> None:
        self.images = images
        self.epoch = 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        seed = torch.default_generator.manual_seed  # torch.manual_seed also seeds GPUs and takes far longer
        state, samples = torch.get_rng_state(), []
        for index in indices:
            seed(self.epoch * len(self) + index)
            samples.append(self.images[index])
        torch.set_rng_state(state)
        return samples


def train(images: dict[str, work.Images]) -> work.Metrics:
    model = work.make_model(images)
    loaders = work.loaders({**images, "train": Seeded(images["train"])})
    return raw.loop(loaders, model=model, optimizer=work.make_optimizer(model))


if __name__ == "__main__":
    work.main(train)
