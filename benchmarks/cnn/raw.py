"""Case b in raw PyTorch: a careful user's loop, without copies from the device in a step."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cnn import work


def train(images: dict[str, work.Images]) -> work.Metrics:
    model = work.make_model(images)
    return loop(work.loaders(images), model=model, optimizer=work.make_optimizer(model))


def loop(
    loaders: dict[str, Iterable[Any]],
    *,
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> work.Metrics:
    """Train and validate; also used by frameworks that leave the loop to the user."""
    criterion, metrics = nn.CrossEntropyLoss(), {}
    for key, loader in loaders.items():
        model.train(key == "train")
        sums = work.Sums()
        with torch.set_grad_enabled(key == "train"):
            for features, targets in loader:
                logits = model(features)
                loss = criterion(logits, targets)
                if key == "train":
                    optimizer.zero_grad()
                    backward(loss)
                    optimizer.step()
                sums.add(loss, logits, targets)
        metrics[key] = sums.means()
    return metrics


if __name__ == "__main__":
    work.main(train)
