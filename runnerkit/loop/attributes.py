"""Groups of a runner's public attributes that are saved, restored or transferred together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from runnerkit.engine import IEngine
from runnerkit.logger import ILogger
from runnerkit.types import Batch, Metrics

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


@dataclass
class Attributes:
    """Values of some of a runner's attributes, by their names there."""

    @classmethod
    def of(cls, runner: IRunner) -> Self:
        """Return the runner's current values."""
        return cls(**{name: getattr(runner, name) for name in cls.names()})

    def restore(self, runner: IRunner) -> None:
        """Give the runner these values again."""
        vars(runner).update(vars(self))

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of the attributes."""
        return {each.name for each in fields(cls)}


@dataclass
class LoaderAttributes(Attributes):
    """Attributes that describe the pass under way; a second pass within it leaves them unchanged."""

    loader_key: str
    loader: Any
    is_train_loader: bool
    is_valid_loader: bool
    is_infer_loader: bool
    is_within_loader: bool
    loader_batch_step: int
    loader_sample_step: int
    loader_batch_len: int | None
    batch: Batch
    batch_size: int
    batch_weight: Any
    batch_metrics: dict[str, Any]
    loader_metrics: Metrics
    need_early_stop: bool
    gradient_step: Any
    loader_pass: Any


@dataclass
class Components(Attributes):
    """Objects that a run trains; the calling process gets them back."""

    model: Any
    criterion: Any
    optimizer: Any
    scheduler: Any


@dataclass
class ProcessAttributes(Attributes):
    """Attributes that belong to the process that runs and never leave it."""

    engine: IEngine
    loaders: dict[str, Any]
    loader: Any
    loggers: dict[str, ILogger]
    batch: Batch
    exception: BaseException | None


class ProcessState:
    """Base of the private objects that belong to the process that runs and never leave it."""

    is_shared_by_scratch_copies = False
