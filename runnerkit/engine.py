"""The contract of an engine: devices, processes and precision; everything else runs on top of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.precision import FP32, Precision
from runnerkit.sampler import shard_loader
from runnerkit.types import Batch, StateDict

T = TypeVar("T")


class IEngine(ABC):
    """Base of engines. The constructor stores and validates; :meth:`setup` opens devices and process groups.

    Args:
        precision: what happens around the forward pass and before the step; None is fp32.

    Attributes:
        device: where this process's model and batches live; known after :meth:`setup`.
        process_index: this process among all of the job, 0 is the main one; also `rank`.
        local_process_index: this process among those of its machine.
        num_processes: processes of the job; also `world_size`.
        is_ddp: whether processes train together.
    """

    is_ddp: bool = False
    process_index: int = 0
    local_process_index: int = 0
    num_processes: int = 1

    def __init__(self, *, precision: Precision | None = None) -> None:
        self.precision = precision or FP32()
        self.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r}, rank={self.rank}, world_size={self.world_size})"

    @property
    def rank(self) -> int:
        """Same as `process_index`."""
        return self.process_index

    @property
    def world_size(self) -> int:
        """Same as `num_processes`."""
        return self.num_processes

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes files."""
        return self.process_index == 0

    # Processes: launch in the caller's process; the rest in each process of the job.

    @abstractmethod
    def launch(self, fn: Callable[[], T]) -> T:
        """Call `fn` in every process of the job; return what rank zero's returned.

        Raises:
            Exception: the first that any process raised, with its traceback.
        """

    @abstractmethod
    def setup(self) -> None:
        """Open the device and join the other processes."""

    @abstractmethod
    def cleanup(self) -> None:
        """Leave the other processes; safe to call twice."""

    @abstractmethod
    def reduce(self, tensor: Tensor, op: Literal["sum", "mean", "min", "max"] = "sum") -> Tensor:
        """Reduce over processes into a new tensor; every rank must call."""

    @abstractmethod
    def gather_object(self, value: T) -> list[T]:
        """Collect a picklable value of every process, by rank; every rank must call."""

    @abstractmethod
    def broadcast_object(self, value: T) -> T:
        """Return rank zero's `value`, picklable; every rank must call."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for every process; every rank must call."""

    def settle(self) -> None:
        """Let threads of the engine's own come to rest; called before a loader forks its workers."""

    # Components.

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Put `model` on the device, before the optimizer is made from its parameters."""
        return model.to(self.device)

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Wrap a model for training, after the optimizer is made; every rank must call."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module inside what :meth:`prepare` gave."""

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """Return the module to evaluate with, the same on all ranks; every rank must call."""
        return model

    def prepare_loader(self, loader: Any, *, key: str, training: bool, seed: int) -> Any:
        """Return this process's share of `loader`; see :func:`runnerkit.sampler.shard_loader`."""
        return shard_loader(loader, key=key, training=training, rank=self.rank, world_size=self.world_size, seed=seed)

    # A step.

    def to_device(self, batch: Batch) -> Batch:
        """Move tensors in nested tuples, lists, dicts and dataclasses; strings and numbers stay.

        Raises:
            TypeError: an element can be neither moved nor passed on, named by its path in the batch.
        """
        return move(batch, self.device, path="batch")

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of ``handle_batch``."""
        return self.precision.autocast()

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Accumulate gradients of `loss`, a () tensor; average them over processes."""
        self.precision.backward(loss)

    def clip_gradients(self, optimizer: Optimizer, clip: Callable[[list[Tensor]], Any]) -> None:
        """Call `clip` with `optimizer`'s parameters, whose gradients are true (unscaled) ones then."""
        self.precision.unscale(optimizer)
        clip([parameter for group in optimizer.param_groups for parameter in group["params"]])

    def step(self, optimizer: Optimizer) -> bool:
        """Step `optimizer`; False when its gradients were not finite and it was skipped."""
        return self.precision.step(optimizer)

    @abstractmethod
    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context of a forward and backward pass whose gradients wait for later ones: no communication."""

    # State.

    def state_dict(self) -> StateDict:
        """State to resume from."""
        return self.precision.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Take back :meth:`state_dict`."""
        self.precision.load_state_dict(state)


def move(value: Any, device: torch.device, *, path: str) -> Any:
    """Move `value` to `device`; see :meth:`IEngine.to_device`."""
    if isinstance(value, Tensor) or callable(getattr(value, "to", None)):
        # Without pinned memory non_blocking is ignored; with it, the copy overlaps the work before.
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: move(item, device, path=f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(
            *(move(item, device, path=f"{path}.{name}") for name, item in zip(value._fields, value, strict=True))
        )
    if isinstance(value, list | tuple):
        return type(value)(move(item, device, path=f"{path}[{index}]") for index, item in enumerate(value))
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: move(getattr(value, f.name), device, path=f"{path}.{f.name}") for f in fields(value) if f.init}
        return replace(value, **moved)
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be moved to {device}; "
        "make it a tensor in the data set or in collate_fn, or give it a method to(device, non_blocking)"
    )
