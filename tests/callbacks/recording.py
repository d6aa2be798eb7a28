"""A runner that records its batches and computes nothing, and a logger that keeps what it gets."""

from typing import Any

from torch import nn

from runnerkit import dl
from tests.tiny import train


class Recording(dl.Runner):
    """A runner that records (epoch, loader) and the value of each batch, and logs the epoch as a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[int, str]] = []
        self.batches: list[Any] = []

    def handle_batch(self, batch: Any) -> None:
        """Record the batch."""
        self.batch_metrics["loss"] = float(self.epoch_step)
        if self.epoch_step:  # epoch 0 is the check before training
            self.places.append((self.epoch_step, self.loader_key))
            self.batches.append(batch)


class Kept(dl.ILogger):
    """A logger that keeps texts, images by loader and tag, and metrics of single steps."""

    log_batch_metrics = True

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.images: dict[tuple[str, str], list[Any]] = {}
        self.steps: list[tuple[int, Any]] = []

    def log_scalars(self, scalars: Any, *, step: Any, scope: str) -> None:
        """Keep the metrics of a single step."""
        if scope == "batch":
            self.steps.append((step.batch, scalars))

    def log_text(self, tag: str, text: str, *, step: Any, scope: str) -> None:
        """Keep the text."""
        self.texts.append(text)

    def log_image(self, tag: str, image: Any, *, step: Any, scope: str) -> None:
        """Keep the image."""
        self.images.setdefault((step.loader, tag), []).append(image)


def record(*callbacks: dl.ICallback, runner: dl.Runner | None = None, **options: Any) -> Any:
    """Run loaders for some epochs without an optimizer; return the runner."""
    model, runner = nn.Linear(1, 1), runner or Recording()
    return train(model, runner=runner, optimizer=None, callbacks=list(callbacks), **options)
