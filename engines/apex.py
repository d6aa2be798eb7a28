"""The engines of NVIDIA Apex: a GPU, all GPUs from one process, and a process a GPU by ``apex.parallel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from runnerkit.engine import EngineOptions
from runnerkit.engines.apex_package import import_part, native
from runnerkit.engines.apex_precision import Apex
from runnerkit.engines.data_parallel import split_batches
from runnerkit.engines.device import DeviceEngine
from runnerkit.engines.horovod import HorovodEngine, HorovodOptions
from runnerkit.engines.process_group import ProcessGroupEngine, ProcessGroupOptions
from runnerkit.engines.single_process import SingleProcessEngine


class ApexOptions(EngineOptions, total=False):
    """Arguments of :class:`runnerkit.engines.Apex` that its engines take, beside every engine's."""

    opt_level: str
    loss_scale: float | Literal["dynamic"] | None
    keep_batchnorm_fp32: bool | None
    float_functions: Sequence[tuple[Any, str]]
    amp_kwargs: dict[str, Any] | None


class ApexProcessGroupOptions(ApexOptions, ProcessGroupOptions, total=False):
    """The same, beside those of every engine over ``torch.distributed``."""


class ApexHorovodOptions(ApexOptions, HorovodOptions, total=False):
    """The same, beside Horovod's."""


def with_apex(
    options: Any,
    *,
    engine: str,
    device: str | torch.device | None,
    before_unscale: Callable[[Optimizer], None] | None = None,
) -> Any:
    """Make Apex's arguments among an engine's options the precision that its name promises.

    Raises:
        TypeError: another precision is among them.
        ValueError: a value that Apex would refuse, or ``compile``.
    """
    if "precision" in options:
        raise TypeError(f"{engine}'s name fixes its precision; pass opt_level= and the like, or take another engine")
    if options.get("compile"):
        raise ValueError(f"torch.compile cannot follow what Apex changes in torch. {native(engine)}, and compiles.")
    arguments = {name: options[name] for name in ApexOptions.__annotations__ if name in options}
    arguments = {name: value for name, value in arguments.items() if name not in EngineOptions.__annotations__}
    rest = {name: value for name, value in options.items() if name not in arguments}
    # A device that is named is the user's word: if it is the CPU, Apex itself refuses.
    precision = Apex(**arguments, before_unscale=before_unscale, allow_cpu=device is not None, engine=engine)
    return {**rest, "precision": precision}


class APEXEngine(DeviceEngine):
    """One GPU, mixed precision by Apex.

    Args:
        device: by default torch's current GPU.
        options: opt_level ("O1"), loss_scale, keep_batchnorm_fp32, float_functions, amp_kwargs as Apex's; the rest as
            IEngine's.

    >>> APEXEngine(opt_level="O2").precision.opt_level
    'O2'
    """

    def __init__(self, device: str | torch.device | None = None, **options: Unpack[ApexOptions]) -> None:
        super().__init__(device, **with_apex(options, engine=type(self).__name__, device=device))


class DataParallelAPEXEngine(SingleProcessEngine):
    """All GPUs from one process, mixed precision by Apex; arguments as APEXEngine's.

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
    """A module around the model, whose forward pass Apex changes instead of the model's (O0, O2, O3).

    DataParallel copies a module with its changed forward, and that would stay the first copy's, on the first GPU.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class DistributedDataParallelAPEXEngine(ProcessGroupEngine):
    """One process a GPU, mixed precision by Apex, gradients averaged by ``apex.parallel``.

    Args:
        num_processes: None is one for each GPU; a launcher's number overrides it.
        delay_allreduce: communicate after the backward pass, not during it; steps that leave parameters out need it.
        sync_bn: share batch statistics between GPUs, by Apex's batch norm.
        ddp_kwargs: further arguments of ``apex.parallel.DistributedDataParallel``.
        options: opt_level ("O1"), loss_scale, keep_batchnorm_fp32, float_functions, amp_kwargs as Apex's; address,
            port, backend, device, devices, timeout_s as ProcessGroupEngine's; the rest as IEngine's.

    >>> DistributedDataParallelAPEXEngine(num_processes=2).is_ddp
    True
    """

    def __init__(
        self,
        num_processes: int | None = None,
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

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return super().prepare_model(_with_sync_bn(model) if self.sync_bn else model)

    def wrap(self, model: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapper: nn.Module = import_part("parallel").DistributedDataParallel(model, **self.ddp_kwargs)
        return wrapper

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if self._is_wrapped(model) else model  # type: ignore[return-value]  # untyped wrapper

    def _is_wrapped(self, model: nn.Module) -> bool:
        return isinstance(model, import_part("parallel").DistributedDataParallel)

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        # Apex's wrapper leaves each process its own buffers; all evaluate with rank zero's.
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
        # Apex copies the weights of a batch norm; an optimizer that was made before holds the originals.
        owner, _, leaf = name.rpartition(".")
        setattr(converted.get_submodule(owner), leaf, parameter)
    return converted


class HorovodAPEXEngine(HorovodEngine):
    """Horovod's processes, mixed precision by Apex; arguments as APEXEngine's and HorovodEngine's.

    >>> HorovodAPEXEngine(num_processes=2).is_ddp
    True
    """

    def __init__(self, num_processes: int | None = None, **options: Unpack[ApexHorovodOptions]) -> None:
        if (op := options.get("op", "average")) != "average":
            raise ValueError(f"op must be 'average' with Apex, which unscales what each pass adds, got {op!r}")
        device, engine = options.get("device"), type(self).__name__
        # At a backward pass's end Apex unscales, and looks for overflows: gradients must be all processes' by then.
        precision = with_apex(options, engine=engine, device=device, before_unscale=self.synchronize)
        super().__init__(num_processes, **precision)
