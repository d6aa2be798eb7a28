"""Engines for NVIDIA Apex: one GPU, all GPUs in one process, and one process per GPU with ``apex.parallel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from runnerkit.engine import EngineOptions
from runnerkit.engines.adapters.apex_package import import_part, native
from runnerkit.engines.adapters.apex_precision import Apex
from runnerkit.engines.data_parallel import split_batches
from runnerkit.engines.device import DeviceEngine
from runnerkit.engines.horovod import HorovodEngine, HorovodOptions
from runnerkit.engines.launch.process_group_engine import ProcessGroupEngine, ProcessGroupOptions
from runnerkit.engines.launch.single_process import SingleProcessEngine
from runnerkit.models.parameters import is_trained

__all__ = ["APEXEngine", "DataParallelAPEXEngine", "DistributedDataParallelAPEXEngine", "HorovodAPEXEngine"]


class ApexOptions(EngineOptions, total=False):
    """Arguments of :class:`runnerkit.engines.Apex` that its engines accept, beside those of every engine."""

    opt_level: str
    loss_scale: float | Literal["dynamic"] | None
    keep_batchnorm_fp32: bool | None
    float_functions: Sequence[tuple[Any, str]]
    amp_kwargs: dict[str, Any] | None


class ApexProcessGroupOptions(ApexOptions, ProcessGroupOptions, total=False):
    """Apex's arguments and those of every engine over ``torch.distributed``."""


class ApexHorovodOptions(ApexOptions, HorovodOptions, total=False):
    """Apex's arguments and Horovod's."""


def with_apex(
    options: Any,
    *,
    engine: str,
    device: str | torch.device | None,
    before_unscale: Callable[[Optimizer], None] | None = None,
) -> Any:
    """Replace Apex's arguments in an engine's options by an :class:`Apex` precision.

    Raises:
        TypeError: the options contain a precision.
        ValueError: a value that Apex would reject, or ``compile``.
    """
    if "precision" in options:
        raise TypeError(
            f"{engine}'s name fixes its precision; pass opt_level= and other Apex options, or use another engine"
        )
    if options.get("compile"):
        raise ValueError(f"torch.compile does not support Apex's changes to torch. {native(engine)}, and compiles.")
    arguments = {name: options[name] for name in ApexOptions.__annotations__ if name in options}
    arguments = {name: value for name, value in arguments.items() if name not in EngineOptions.__annotations__}
    rest = {name: value for name, value in options.items() if name not in arguments}
    # If the user names the CPU explicitly, leave the refusal to Apex itself.
    precision = Apex(**arguments, before_unscale=before_unscale, allow_cpu=device is not None, engine=engine)
    return {**rest, "precision": precision}


class APEXEngine(DeviceEngine):
    """One GPU with Apex mixed precision.

    Args:
        device: defaults to torch's current GPU.
        options: opt_level ("O1"), loss_scale, keep_batchnorm_fp32, float_functions, amp_kwargs as in Apex; the rest as
            in IEngine.

    >>> APEXEngine(opt_level="O2").precision.opt_level
    'O2'
    """

    def __init__(self, device: str | torch.device | None = None, **options: Unpack[ApexOptions]) -> None:
        super().__init__(device, **with_apex(options, engine=type(self).__name__, device=device))


class DataParallelAPEXEngine(SingleProcessEngine):
    """All GPUs in one process with Apex mixed precision; arguments as in APEXEngine.

    >>> DataParallelAPEXEngine().precision.opt_level
    'O1'
    """

    def __init__(self, device: str | torch.device | None = None, **options: Unpack[ApexOptions]) -> None:
        super().__init__(device, **with_apex(options, engine=type(self).__name__, device=device))

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        return super().prepare({key: _Shell(model) for key, model in models.items()}, optimizers)

    def wrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, _Shell)
        model.module = split_batches(model.module, self.device)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        while isinstance(model, _Shell | nn.DataParallel):
            model = model.module
        return model


class _Shell(nn.Module):
    """A module around the model, so that Apex patches its forward instead of the model's (O0, O2, O3).

    DataParallel would copy a model with its patched forward, which stays bound to the original on the first GPU.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class DistributedDataParallelAPEXEngine(ProcessGroupEngine):
    """One process per GPU with Apex mixed precision; ``apex.parallel`` averages gradients.

    Args:
        num_processes: None means one per GPU; a launcher's number overrides it.
        delay_allreduce: communicate after the backward pass, not during it; required if steps leave parameters unused.
        sync_bn: share batch statistics between GPUs, with Apex's batch norm.
        ddp_kwargs: further arguments of ``apex.parallel.DistributedDataParallel``.
        options: opt_level ("O1"), loss_scale, keep_batchnorm_fp32, float_functions, amp_kwargs as in Apex; address,
            port, backend, device, devices, timeout_s as in ProcessGroupEngine; the rest as in IEngine.

    >>> DistributedDataParallelAPEXEngine(num_processes=2).is_ddp
    True
    """

    def __init__(
        self,
        num_processes: int | tuple[int, int] | None = None,
        *,
        delay_allreduce: bool = False,
        sync_bn: bool = False,
        ddp_kwargs: dict[str, Any] | None = None,
        **options: Unpack[ApexProcessGroupOptions],
    ) -> None:
        device = options.get("device")
        super().__init__(num_processes, **with_apex(options, engine=type(self).__name__, device=device))
        self.ddp_kwargs = {**(ddp_kwargs or {}), "delay_allreduce": delay_allreduce}
        self.sync_bn = sync_bn
        self._exchange.allows_unused = (
            f"pass engine=dl.{type(self).__name__}(delay_allreduce=True), instead of ddp=True, apex=True"
        )

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return super().prepare_model(_with_sync_bn(model) if self.sync_bn else model)

    def wrap(self, model: nn.Module) -> nn.Module:
        if not is_trained(model):
            return model
        wrapper: nn.Module = import_part("parallel").DistributedDataParallel(model, **self.ddp_kwargs)
        return wrapper

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if self._is_wrapped(model) else model  # type: ignore[return-value]  # untyped wrapper

    def _is_wrapped(self, model: nn.Module) -> bool:
        return isinstance(model, import_part("parallel").DistributedDataParallel)

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        # With Apex's wrapper each process keeps its own buffers; evaluate with rank zero's on all ranks.
        module = self.unwrap(model)
        self.broadcast_buffers(module)
        return module

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        if not self._is_wrapped(model):
            yield
            return
        wrapper: Any = model
        wrapper.disable_allreduce()
        try:
            yield
        finally:
            wrapper.enable_allreduce()


def _with_sync_bn(model: nn.Module) -> nn.Module:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    converted: nn.Module = import_part("parallel").convert_syncbn_model(model)
    for name, parameter in parameters.items():
        # Apex copies the weights of a batch norm, but an optimizer created earlier holds the originals.
        owner, _, leaf = name.rpartition(".")
        setattr(converted.get_submodule(owner), leaf, parameter)
    return converted


class HorovodAPEXEngine(HorovodEngine):
    """Horovod with Apex mixed precision; arguments as in APEXEngine and HorovodEngine.

    >>> HorovodAPEXEngine(num_processes=2).is_ddp
    True
    """

    def __init__(self, num_processes: int | None = None, **options: Unpack[ApexHorovodOptions]) -> None:
        if (op := options.get("op", "average")) != "average":
            raise ValueError(f"op must be 'average' with Apex, which unscales after each backward pass, got {op!r}")
        device, engine = options.get("device"), type(self).__name__
        # Apex unscales and checks for overflows at the end of backward: gradients must be reduced by then.
        precision = with_apex(options, engine=engine, device=device, before_unscale=self.synchronize)
        super().__init__(num_processes, **precision)
