"""Numbers of a run, logged without training."""

import math

from runnerkit.logger import ILogger, Scope, Step

Record = tuple[Scope, str, int, int, dict[str, float]]  # scope, loader, epoch, step, metrics

# Two epochs of four steps, evaluated every second step and at each epoch's end; one metric comes late.
RUN: list[Record] = [
    ("batch", "train", 1, 1, {"loss": 1.1}),
    ("batch", "train", 1, 2, {"loss": 1.2}),
    ("loader", "valid", 1, 2, {"loss": 2.2}),
    ("batch", "train", 1, 3, {"loss": 1.3}),
    ("batch", "train", 1, 4, {"loss": 1.4, "clipped": 0.5}),
    ("loader", "valid", 1, 4, {"loss": 2.4}),
    ("loader", "train", 1, 4, {"loss": 1.25}),
    ("loader", "valid", 1, 4, {"loss": 2.4}),
    ("batch", "train", 2, 5, {"loss": 1.5}),
    ("batch", "train", 2, 6, {"loss": 1.6}),
    ("loader", "valid", 2, 6, {"loss": 2.6, "auc": math.nan}),
    ("batch", "train", 2, 7, {"loss": 1.7}),
    ("batch", "train", 2, 8, {"loss": 1.8, "norm": math.inf}),
    ("loader", "valid", 2, 8, {"loss": 2.8, "auc": 0.8}),
    ("loader", "train", 2, 8, {"loss": 1.65}),
    ("loader", "valid", 2, 8, {"loss": 2.8, "auc": 0.8}),
]


def log(logger: ILogger, records: list[Record], *, resumed_at: Step | None = None) -> None:
    """Set a logger up, log the records and close it."""
    logger.setup(resumed_at=resumed_at)
    for scope, loader, epoch, step, metrics in records:
        logger.log_scalars(metrics, step=Step("train", loader, epoch, step), scope=scope)
    logger.close()
