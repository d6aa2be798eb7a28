"""Where numbers go: one class for each kind of log; none of them has heard of a runner."""

from __future__ import annotations

if __name__ != "runnerkit.loggers":
    raise ImportError("import runnerkit.loggers, not loggers: this folder is the package runnerkit.loggers")

from typing import TYPE_CHECKING

from runnerkit.late_names import late_names
from runnerkit.loggers.console import ConsoleLogger
from runnerkit.loggers.csv import CSVLogger
from runnerkit.loggers.jsonl import JSONLLogger
from runnerkit.loggers.tensorboard import TensorboardLogger

if TYPE_CHECKING:
    from runnerkit.loggers.comet import CometLogger
    from runnerkit.loggers.mlflow import MLflowLogger
    from runnerkit.loggers.wandb import WandbLogger
else:  # asked for by few: imported when it is
    __getattr__, __dir__ = late_names(
        __name__,
        {
            "comet": ("CometLogger",),
            "mlflow": ("MLflowLogger",),
            "wandb": ("WandbLogger",),
        },
    )

__all__ = [
    "CSVLogger",
    "CometLogger",
    "ConsoleLogger",
    "JSONLLogger",
    "MLflowLogger",
    "TensorboardLogger",
    "WandbLogger",
]
