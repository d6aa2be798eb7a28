"""The interface of engines, which manage devices, processes and precision."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any, Literal, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.job_process import JobProcess
from runnerkit.metrics.reduction import Processes
from runnerkit.models.parameters import check_shapes
from runnerkit.models.regions import Regions, check_classes
from runnerkit.models.restored import restored
from runnerkit.precision import Precision
from runnerkit.precision_names import PrecisionName, as_precision
from runnerkit.sampling.feed import for_device
from runnerkit.sampling.sharding import shard_loader
from runnerkit.support.arguments import RENAMED, refuse_renamed
from runnerkit.support.backend_switches import BackendSwitches
from runnerkit.support.device_move import move
from runnerkit.support.torch_internals import uncompiled as uncompiled  # for authors of engines
from runnerkit.types import Batch, StateDict

__all__ = ["IEngine"]


class EngineOptions(TypedDict, total=False):
    """Arguments that every engine accepts; see :class:`IEngine`."""

    precision: Precision | PrecisionName | None
    compile: bool | dict[str, Any]
    checkpoint_modules: Sequence[type[nn.Module]] | None
    checkpoint_kept_ops: Sequence[Any] | None
    channels_last: bool
    tf32: bool | None
    cudnn_benchmark: bool | None
    uneven_batches: Literal["drop", "pad"]


class IEngine(JobProcess, ABC):
    """The base class of engines. The constructor validates; :meth:`setup` opens devices and process groups.

    Args:
        precision: numeric precision of the forward pass and the step, or its name, such as "bf16"; None is fp32.
        compile: compile models with ``torch.compile``; a dict is passed as its arguments, such as
            ``{"mode": "max-autotune"}``. With classes as ``{"modules": [Block]}``, each module of these is compiled
            instead of the model, all of a class at once.
        checkpoint_modules: classes of modules, such as a transformer's blocks, whose activations are recomputed in the
            backward pass instead of kept in memory.
        checkpoint_kept_ops: operations in them whose results are kept, such as ``[torch.ops.aten.mm.default]``.
        channels_last: store images, (N, C, H, W), and the weights of their convolutions in memory as (N, H, W, C).
        tf32, cudnn_benchmark: see :class:`.support.backend_switches.BackendSwitches`; None keeps torch's setting.
        uneven_batches: without effect, and deprecated: no whole batch is dropped or repeated (docs/data.md).

    Attributes:
        device: device of this process's model and batches; known after :meth:`setup`.
        in_use: True in a process in which a run is under way on the engine.
        communicator, process_index, local_process_index, num_processes: as in :class:`.job_process.JobProcess`.
        is_ddp: True if processes train together.
        tensor_parallel: number of processes, of neighboring ranks, that work on the same samples.
        sharded_checkpoints: True if each process saves its own shard with :meth:`save_shards`.
        never_whole: True if no process ever holds all weights: each loads its own shard, and in an evaluation all take
            as many batches.
        weigh_loss: takes a loss and an optimizer or None, and returns the weighted loss that :meth:`backward` uses, as
            the mean over processes weights all equally; set by a pass over a training loader whose weights may differ.
    """

    is_ddp: bool = False
    tensor_parallel: int = 1
    sharded_checkpoints: bool = False
    never_whole: bool = False

    def __init__(self, **options: Unpack[EngineOptions]) -> None:
        unknown = options.keys() - EngineOptions.__annotations__
        if unknown:
            refuse_renamed(type(self), RENAMED["IEngine"], unknown)
            raise TypeError(
                f"{type(self).__name__} got {', '.join(sorted(unknown))}; in addition to its own arguments it accepts "
                f"{', '.join(EngineOptions.__annotations__)}"
            )
        self.precision = as_precision(options.get("precision"), owner=self)
        compile = options.get("compile", False)
        self.compile_arguments = dict(compile) if isinstance(compile, dict) else {} if compile else None
        self.regions = self._regions(options)
        self.channels_last = options.get("channels_last", False)
        self.switches = BackendSwitches(tf32=options.get("tf32"), cudnn_benchmark=options.get("cudnn_benchmark"))
        if "uneven_batches" in options:
            warnings.warn(
                "uneven_batches is deprecated since 0.2.0 and will be removed in 1.0.0: leave it out, it is ignored; "
                "no whole batch is dropped or repeated any more", FutureWarning, stacklevel=2,
            )  # fmt: skip
        self.device = torch.device("cpu")
        self.in_use = False
        self.weigh_loss: Callable[[Tensor, Optimizer | None], Tensor] | None = None
        self._compiled: dict[int, nn.Module] = {}

    def _regions(self, options: EngineOptions) -> Regions:
        checkpointed = options.get("checkpoint_modules") or ()
        kept_ops = options.get("checkpoint_kept_ops") or ()
        if kept_ops and not checkpointed:
            raise ValueError("checkpoint_kept_ops needs checkpoint_modules, such as [Block], to act on")
        check_classes("checkpoint_modules", checkpointed)
        if "modules" not in (self.compile_arguments or {}):
            return Regions(checkpointed=checkpointed, kept_ops=kept_ops)
        arguments, self.compile_arguments = self.compile_arguments or {}, None  # the model itself is not compiled
        compiled = arguments.pop("modules")
        check_classes("compile's modules", compiled)
        return Regions(checkpointed=checkpointed, kept_ops=kept_ops, compiled=compiled, compile_arguments=arguments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r}, rank={self.rank}, world_size={self.world_size})"

    @property
    def data_parallel(self) -> Processes:
        """The processes among which data is divided, for sums over samples: this engine itself, unless several
        processes work on the same samples (tensor parallelism)."""
        return self

    # Requirements and devices: check runs in the caller's process, the rest in each process of the job.

    def check(self) -> None:
        self.precision.check()

    @abstractmethod
    def setup(self) -> None:
        """Open the device with :meth:`open_device` and join the other processes."""

    def open_device(self, device: torch.device) -> None:
        """Use `device` in this process, set up the precision for it, and set torch's backend switches."""
        self.device = device
        self.precision.setup(device)
        self.switches.set()

    def cleanup(self) -> None:
        """Leave the process group and restore torch's switches and the optimizers; safe to call twice."""
        self.weigh_loss = None  # an exception may have left one
        self.regions.leave()
        self.precision.cleanup()
        self.switches.restore()

    # Remedies, which only the engine knows.

    def what_may_differ(self) -> list[str]:
        """List what may differ between runs although torch's algorithms are deterministic, with a remedy for each."""
        return []

    def explain(self, error: BaseException, models: dict[str, nn.Module]) -> str | None:
        """Return what to do about an error that the engine's wrappers raise in a training step; None for any other.

        Args:
            models: results of :meth:`prepare`.
        """
        return None

    # Components.

    def making_model(self, *, seed: int) -> AbstractContextManager[Any]:
        """Return the context in which models are made.

        Args:
            seed: for the values of parameters, where the engine computes them.
        """
        return nullcontext()

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move `model` to the device, before the optimizer is created from its parameters.

        Raises:
            ValueError: the engine needs the shapes of the parameters, which lazy modules do not know yet.
        """
        if self.is_ddp or self.channels_last:
            check_shapes(model, type(self).__name__ if self.is_ddp else "channels_last=True")
        if self.channels_last:
            return model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
        return model.to(self.device)

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        """Wrap models and optimizers for training; every rank must call, with the same keys in the same order."""
        models, optimizers = self.precision.prepare(models, optimizers)
        self.regions.enter(models.values())
        return {key: self.wrap(model) for key, model in models.items()}, optimizers

    def release(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        """Undo :meth:`prepare` after a successful stage and return the user's objects; every rank must call."""
        self._compiled.clear()
        self.regions.leave()
        self.precision.release()
        return {key: self.unwrap(model) for key, model in models.items()}, optimizers

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model for training; every rank must call."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module inside the result of :meth:`prepare`."""

    def trained_module(self, model: nn.Module) -> nn.Module:
        """Return the module that holds the weights in training: the user's, unless the engine trains a sharded copy of
        it."""
        return self.unwrap(model)

    def trained_parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        """Return the parameters in training by name, a tied one under each of its names; if they are sharded, the
        shards, also while :meth:`trained_module` holds the full ones that a forward pass gathered."""
        return self.trained_module(model).named_parameters(remove_duplicate=False)

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """Return the module to evaluate with, the same on all ranks; every rank must call."""
        return model

    def training_model(self, model: nn.Module) -> nn.Module:
        """Return the module to train with after an evaluation; `model` is the result of :meth:`prepare`."""
        return model

    def compiled(self, module: nn.Module) -> nn.Module:
        """Return the compiled `module` if the engine has `compile` set, the same object each time; else `module`."""
        if self.compile_arguments is None:
            return module
        if id(module) not in self._compiled:
            self._compiled[id(module)] = cast(nn.Module, torch.compile(module, **self.compile_arguments))
        return self._compiled[id(module)]

    def prepare_loader(self, loader: Any, *, key: str, training: bool, seed: int) -> Any:
        """Return this process's share of `loader`; see :func:`runnerkit.sampling.sharding.shard_loader`.

        If the loader has a method ``for_device(device)``, its result for the engine's device is returned.
        """
        ranks = self.data_parallel
        place: dict[str, Any] = {"rank": ranks.rank, "world_size": ranks.num_processes, "seed": seed}
        share = shard_loader(loader, key=key, training=training, **place)
        return for_device(share, self.device)

    # A step.

    def to_device(self, batch: Batch) -> Batch:
        """Move tensors, and objects with a method ``to``, in nested containers: tuples, lists, deques, sets, mappings
        and dataclasses, which keep their classes; everything else is kept.
        """
        if (type(batch) is tuple or type(batch) is list) and not self.channels_last:
            for each in batch:
                if type(each) is not Tensor or each.device != self.device:
                    break
            else:  # all on the device already; this check costs a fifth of move()
                return batch if type(batch) is tuple else [*batch]  # a copy, since the user may change the list later
        return move(batch, self.device, channels_last=self.channels_last)

    def sync_device(self, tensor_or_module: Any) -> Any:
        """Return a module on the device, or a batch as :meth:`to_device` does; the name that Catalyst has for both."""
        if isinstance(tensor_or_module, nn.Module):
            return tensor_or_module.to(self.device)
        return self.to_device(tensor_or_module)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of ``handle_batch``; called after :meth:`setup` and entered for each batch."""
        return self.precision.autocast()

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Accumulate gradients of `loss`, a () tensor, and average them over processes, weighted by `weigh_loss`.

        Args:
            optimizer: the one that will step on them; needed by Apex with several optimizers, and for one that steps
                beside OptimizerCallbacks.
        """
        if self.weigh_loss is not None:
            loss = self.weigh_loss(loss, optimizer)
        self.precision.backward(loss, optimizer)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Reset `optimizer`'s gradients before the first batch of a step, including those that no step used."""
        zero_grad: Any = optimizer.zero_grad
        if not isinstance(zero_grad, MethodType) or zero_grad.__func__ is not Optimizer.zero_grad:
            zero_grad()
            return
        # Like torch's zero_grad, but without its profiler record, which takes twenty times as long.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def synchronize(self, optimizer: Optimizer) -> None:
        """Wait until `optimizer`'s gradients are averaged over processes and may be read; every rank must call."""
        self.precision.collect(optimizer)

    def unscale(self, optimizer: Optimizer) -> None:
        """Average the gradients of `optimizer` over processes and unscale them, to be read; every rank must call."""
        self.synchronize(optimizer)
        self.precision.unscale(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip: Callable[[list[Tensor]], Any]) -> None:
        """Unscale the gradients of `optimizer` and call `clip` with its parameters."""
        self.unscale(optimizer)
        parameters = self.precision.parameters(optimizer)
        with self.joint_gradients(parameters):
            clip(parameters)

    def joint_gradients(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        """Return a context in which a norm over the gradients of all parameters can be computed."""
        return nullcontext()

    def step(self, optimizer: Optimizer) -> bool:
        """Step `optimizer`; return False if the step was skipped because of non-finite gradients."""
        return self.precision.step(optimizer)

    @contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Run a forward and backward pass for gradient accumulation, without communication (context manager)."""
        with self.precision.accumulate(), self.no_sync(model):
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients of `model`, a result of :meth:`prepare`, are not synchronized."""
        return nullcontext()

    @contextmanager
    def training_alone(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> Iterator[dict[str, nn.Module]]:
        """Let each process make training steps that wait for no other process, but need as much memory as in the job.

        Models and optimizers are restored on exit. Every rank must enter.

        Args:
            models: results of :meth:`prepare`.
        Yields:
            The modules to train, by key.
        """
        choose = self.training_model if self.num_processes == 1 else self.unwrap
        modules = {key: choose(model) for key, model in models.items()}
        with restored(modules.values(), optimizers.values()):
            yield modules

    # State. Models and optimizers return full state dicts even if they are sharded, so any engine can load them.

    def model_state_dict(self, model: nn.Module, *, whole: bool = True) -> StateDict:
        """Return the weights of the user's module, without prefixes of wrappers; every rank must call.

        Args:
            whole: return the full state dict; False returns this process's shard, for :meth:`save_shards`.
        """
        return self.unwrap(model).state_dict()

    def load_model_state_dict(self, model: nn.Module, state: StateDict) -> None:
        """Load weights into the user's module; every rank must call."""
        self.unwrap(model).load_state_dict(state)
        self.precision.refresh()

    def optimizer_state_dict(self, optimizer: Optimizer, *, whole: bool = True) -> StateDict:
        """Return an optimizer's state, or this process's shard of it; every rank must call."""
        return optimizer.state_dict()

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: StateDict) -> None:
        """Load an optimizer's state; every rank must call."""
        optimizer.load_state_dict(state)

    def whole_state(self, state: Any) -> Any:
        """Gather the sharded tensors in nested dicts, lists and tuples; every rank must call."""
        return state

    def save_shards(self, state: StateDict, folder: Path, *, asynchronous: bool) -> Callable[[], StateDict]:
        """Start to write this process's shard of `state` into `folder`.

        Returns:
            A function that completes the write and returns the rest of `state`; every rank must call both.

        Args:
            asynchronous: copy now, so that the state may change and the function may be called in a thread.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support sharded checkpoints")

    def load_shards(self, state: StateDict | None, folder: Path, *, only_weights: bool = False) -> StateDict:
        """Load this process's shard from `folder` and merge it into `state`; every rank must call.

        Args:
            state: what :meth:`save_shards` returned; None for a folder with the weights of another program.
            only_weights: leave out all other tensors, such as those of optimizers.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support sharded checkpoints")

    def state_dict(self) -> StateDict:
        """Return the state to resume from."""
        return self.precision.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Load a :meth:`state_dict`."""
        self.precision.load_state_dict(state)
