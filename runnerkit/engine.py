"""The contract of an engine: devices, processes and precision; everything else runs on top of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.backends import BackendSwitches
from runnerkit.precision import FP32, Precision
from runnerkit.sampling.sampler import Uneven
from runnerkit.sampling.sharding import shard_loader
from runnerkit.types import Batch, StateDict

T = TypeVar("T")


class EngineOptions(TypedDict, total=False):
    """Arguments that every engine takes; see :class:`IEngine`."""

    precision: Precision | None
    compile: bool | dict[str, Any]
    channels_last: bool
    tf32: bool | None
    cudnn_benchmark: bool | None
    uneven_batches: Uneven


class IEngine(ABC):
    """Base of engines. The constructor stores and validates; :meth:`setup` opens devices and process groups.

    Args:
        precision: what happens around the forward pass and before the step; None is fp32.
        compile: compile models by ``torch.compile``; a dict holds its arguments, such as ``{"mode": "max-autotune"}``.
        channels_last: keep images, (N, C, H, W), and the weights of their convolutions in memory as (N, H, W, C).
        tf32, cudnn_benchmark: see :class:`runnerkit.backends.BackendSwitches`; None leaves torch's setting.
        uneven_batches: whether, in training, a loader's last whole batches (of a batch sampler of the user's own, of
            ``batch_size=None``) that are too few for all processes are dropped, or the first ones repeated ("pad").

    Attributes:
        device: where this process's model and batches live; known after :meth:`setup`.
        process_index: this process among all of the job, 0 is the main one; also `rank`.
        local_process_index: this process among those of its machine.
        num_processes: processes of the job; also `world_size`.
        is_ddp: whether processes train together.
        sharded_checkpoints: whether each process saves its own part: :meth:`save_shards`.
    """

    is_ddp: bool = False
    process_index: int = 0
    local_process_index: int = 0
    num_processes: int = 1
    sharded_checkpoints: bool = False

    def __init__(self, **options: Unpack[EngineOptions]) -> None:
        unknown = options.keys() - EngineOptions.__annotations__
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got {', '.join(sorted(unknown))}; beside its own arguments it takes "
                f"{', '.join(EngineOptions.__annotations__)}"
            )
        self.precision = options.get("precision") or FP32()
        compile = options.get("compile", False)
        self.compile_arguments = compile if isinstance(compile, dict) else {} if compile else None
        self.channels_last = options.get("channels_last", False)
        self.switches = BackendSwitches(tf32=options.get("tf32"), cudnn_benchmark=options.get("cudnn_benchmark"))
        self.uneven_batches: Uneven = options.get("uneven_batches", "drop")
        if self.uneven_batches not in ("drop", "pad"):
            raise ValueError(f"uneven_batches must be 'drop' or 'pad', got {self.uneven_batches!r}")
        self.device = torch.device("cpu")
        self._compiled: dict[int, nn.Module] = {}

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

    def check(self) -> None:
        """Refuse a machine that lacks what this engine needs, a package or a GPU; no process is started.

        Raises:
            ImportError, RuntimeError: with what to do.
        """
        self.precision.check()

    @abstractmethod
    def launch(self, fn: Callable[[], T]) -> T:
        """Call `fn` in every process of the job; return what rank zero's returned.

        Raises:
            Exception: the first that any process raised, with its traceback.
        """

    @abstractmethod
    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        """Iterate `fn()` in every process of the job; yield the processes' first values, by rank, then their second
        ones, and so on; without those that have ended. Nothing starts before the first is asked for.

        They are yielded to each process that called: one if the engine starts the others, all under a launcher, and
        then all must take equally many.

        Raises:
            Exception: as :meth:`launch`.
        """

    @abstractmethod
    def setup(self) -> None:
        """Open the device, by :meth:`open_device`, and join the other processes."""

    def open_device(self, device: torch.device) -> None:
        """Make `device` this process's, set up the precision for it, and throw torch's switches."""
        self.device = device
        self.precision.setup(device)
        self.switches.set()

    def cleanup(self) -> None:
        """Leave the other processes; put torch's switches and the optimizers back; safe to call twice."""
        self.precision.cleanup()
        self.switches.restore()

    @abstractmethod
    def reduce(self, tensor: Tensor, op: Literal["sum", "mean", "min", "max"] = "sum") -> Tensor:
        """Reduce over processes into a new tensor; every rank must call."""

    @abstractmethod
    def gather_object(self, value: T) -> list[T]:
        """Collect a picklable value of every process, by rank; every rank must call."""

    def gather_rounds(self, values: Generator[T, None, None]) -> Generator[list[T], None, None]:
        """Yield the ranks' first values, by rank, then their second ones, until all have ended; every rank must take
        all rounds. A rank whose `values` have ended is left out.
        """
        with closing(values):
            while gathered := [value for theirs in self.gather_object(list(islice(values, 1))) for value in theirs]:
                yield gathered

    @abstractmethod
    def broadcast_object(self, value: T) -> T:
        """Return rank zero's `value`, picklable; every rank must call."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for every process; every rank must call."""

    def record_failure(self, error: BaseException) -> None:
        """Let the other processes, or the one that started this, know of `error` whatever happens from now on.

        Called before ``on_exception``. If `error` says that another process did not answer, this may take seconds, and
        adds to it where that process stands.
        """

    def enter_training_loader(self, position: Callable[[], int]) -> None:
        """Begin to train on a loader; every rank must call.

        Args:
            position: gives the number of the batch under way; called in a thread.
        """

    def leave_training_loader(self, num_batches: int, *, key: str) -> None:
        """Wait until every process has trained on loader `key`, on equally many batches; every rank must call.

        Raises:
            ValueError: a process has another number of them.
        """

    def settle(self) -> None:
        """Let threads of the engine's own come to rest; called before a loader forks its workers."""

    # Components.

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Put `model` on the device, before the optimizer is made from its parameters."""
        if self.channels_last:
            return model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
        return model.to(self.device)

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        """Wrap what is trained, optimizers being made; every rank must call, with the same keys in the same order."""
        models, optimizers = self.precision.prepare(models, optimizers)
        return {key: self.wrap(model) for key, model in models.items()}, optimizers

    def release(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        """Undo :meth:`prepare` when a stage went well: the user's objects, trained; every rank must call."""
        self._compiled.clear()
        self.precision.release()
        return {key: self.unwrap(model) for key, model in models.items()}, optimizers

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model for training; every rank must call."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module inside what :meth:`prepare` gave."""

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """Return the module to evaluate with, the same on all ranks; every rank must call."""
        return model

    def training_model(self, model: nn.Module) -> nn.Module:
        """Return the module to train with, which evaluation is over for: `model`, as :meth:`prepare` gave it."""
        return model

    def compiled(self, module: nn.Module) -> nn.Module:
        """Return `module` as ``torch.compile`` makes it, if the engine was told to compile; the same one each time."""
        if self.compile_arguments is None:
            return module
        if id(module) not in self._compiled:
            self._compiled[id(module)] = cast(nn.Module, torch.compile(module, **self.compile_arguments))
        return self._compiled[id(module)]

    def prepare_loader(self, loader: Any, *, key: str, training: bool, seed: int) -> Any:
        """Return this process's share of `loader`; see :func:`runnerkit.sampling.sharding.shard_loader`.

        A loader with a method ``for_device`` (takes the device, returns the loader for it) is told the engine's.
        """
        place = {"rank": self.rank, "world_size": self.world_size, "seed": seed}
        share = shard_loader(loader, key=key, training=training, uneven=self.uneven_batches, **place)
        for_device = getattr(share, "for_device", None)
        return for_device(self.device) if callable(for_device) else share

    # A step.

    def to_device(self, batch: Batch) -> Batch:
        """Move tensors in nested tuples, lists, dicts and dataclasses; strings and numbers stay.

        Raises:
            TypeError: an element can be neither moved nor passed on, named by its path in the batch.
        """
        if (type(batch) is tuple or type(batch) is list) and not self.channels_last:
            for each in batch:
                if type(each) is not Tensor or each.device != self.device:
                    break
            else:  # they are there: asking them costs a fifth of moving them
                return batch if type(batch) is tuple else [*batch]  # a list of the user's own may be changed later
        return move(batch, self.device, path="batch", channels_last=self.channels_last)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of ``handle_batch``: asked for once a run, after :meth:`setup`, and entered for each batch."""
        return self.precision.autocast()

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Accumulate gradients of `loss`, a () tensor; average them over processes.

        Args:
            optimizer: which one will step on them; only Apex wants to know, and only if there are several.
        """
        self.precision.backward(loss, optimizer)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Forget `optimizer`'s gradients, before the first batch of a step; also those that no step was taken on."""
        if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            optimizer.zero_grad()
            return
        # What torch's own does, less the record that it makes for a profiler, which takes twenty times as long.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def synchronize(self, optimizer: Optimizer) -> None:
        """Wait until `optimizer`'s gradients are those of all processes, before they are read; every rank must call."""
        self.precision.collect(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip: Callable[[list[Tensor]], Any]) -> None:
        """Call `clip` with `optimizer`'s parameters, whose gradients are true (unscaled) ones then."""
        self.synchronize(optimizer)
        self.precision.unscale(optimizer)
        clip(self.precision.parameters(optimizer))

    def step(self, optimizer: Optimizer) -> bool:
        """Step `optimizer`; False when its gradients were not finite and it was skipped."""
        return self.precision.step(optimizer)

    @contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Context of a forward and backward pass whose gradients wait for later ones: no communication."""
        with self.precision.accumulate(), self.no_sync(model):
            yield

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which gradients of `model`, as :meth:`prepare` gave it, stay in this process."""

    # State. That of models and optimizers is whole, whoever holds which part of it: any engine loads any other's.

    def model_state_dict(self, model: nn.Module, *, whole: bool = True) -> StateDict:
        """Take the weights of the user's module, without any wrapper's prefix; every rank must call.

        Args:
            whole: False takes this process's part of them, for :meth:`save_shards`.
        """
        return self.unwrap(model).state_dict()

    def load_model_state_dict(self, model: nn.Module, state: StateDict) -> None:
        """Put weights into the user's module; every rank must call."""
        self.unwrap(model).load_state_dict(state)
        self.precision.refresh()

    def optimizer_state_dict(self, optimizer: Optimizer, *, whole: bool = True) -> StateDict:
        """Take an optimizer's state, or this process's part of it; every rank must call."""
        return optimizer.state_dict()

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: StateDict) -> None:
        """Put back an optimizer's state; every rank must call."""
        optimizer.load_state_dict(state)

    def save_shards(self, state: StateDict, folder: Path, *, asynchronous: bool) -> Callable[[], StateDict]:
        """Begin to write this process's part of `state` into `folder`.

        Returns:
            what ends that, and gives the rest of `state`; every rank must call both.

        Args:
            asynchronous: take a copy now, so that the state may change, and the end may be called in a thread.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sharded checkpoints")

    def load_shards(self, state: StateDict, folder: Path) -> StateDict:
        """Put this process's part of what is in `folder` into the rest of the state; every rank must call."""
        raise NotImplementedError(f"{type(self).__name__} has no sharded checkpoints")

    def state_dict(self) -> StateDict:
        """State to resume from."""
        return self.precision.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Take back :meth:`state_dict`."""
        self.precision.load_state_dict(state)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given, or `module` itself."""
    return getattr(module, "_orig_mod", module)


def move(value: Any, device: torch.device, *, path: str, channels_last: bool = False) -> Any:
    """Move `value` to `device`; see :meth:`IEngine.to_device`.

    Args:
        path: of `value` in the batch, for messages.
        channels_last: lay out 4-dimensional float tensors as (N, H, W, C) in memory; their shape stays.
    """
    if isinstance(value, Tensor) and channels_last and value.ndim == 4 and value.is_floating_point():
        return value.to(device, non_blocking=True, memory_format=torch.channels_last)
    if isinstance(value, Tensor) or callable(getattr(value, "to", None)):
        # Without pinned memory non_blocking is ignored; with it, the copy overlaps the work before.
        return value.to(device, non_blocking=True)
    move_inner = partial(move, device=device, channels_last=channels_last)
    if isinstance(value, dict):
        return {key: move_inner(item, path=f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names: tuple[str, ...] = value._fields  # pyright: ignore[reportAttributeAccessIssue]  # a named tuple has it
        return type(value)(*(move_inner(item, path=f"{path}.{name}") for name, item in zip(names, value, strict=True)))
    if isinstance(value, list | tuple):
        return type(value)(move_inner(item, path=f"{path}[{index}]") for index, item in enumerate(value))
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: move_inner(getattr(value, f.name), path=f"{path}.{f.name}") for f in fields(value) if f.init}
        return replace(value, **moved)
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be moved to {device}; "
        "make it a tensor in the data set or in collate_fn, or give it a method to(device, non_blocking)"
    )
