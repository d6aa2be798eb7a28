"""Choice of an engine by flags or by the hardware of this machine."""

from __future__ import annotations

from typing import Any

import torch

from runnerkit.engine import IEngine
from runnerkit.engines.apex import APEXEngine, DataParallelAPEXEngine, DistributedDataParallelAPEXEngine
from runnerkit.engines.data_parallel import DataParallelEngine
from runnerkit.engines.ddp import DistributedDataParallelEngine
from runnerkit.engines.device import CPUEngine, GPUEngine
from runnerkit.precision_names import PRECISION_NAMES, precision_by_name, precision_called, suggested_precision
from runnerkit.support.accelerator import get_device
from runnerkit.support.arguments import check_flags

__all__ = ["get_available_engine"]


def check_engine_flags(**flags: Any) -> None:
    """Raise unless the flags that choose an engine are True or False; another value looks like an option of it.

    Raises:
        TypeError: with what to write instead.
    """
    for name, value in flags.items():
        if isinstance(value, int) and value > 1 and name == "ddp":
            instead = f"engine=dl.DistributedDataParallelEngine({value}) starts {value} processes"
            raise TypeError(f"ddp must be True or False, got {value}; {instead}")
        if name in ("fp16", "amp") and (meant := precision_called(value)) is not None:
            raise TypeError(f"{name} must be True or False, got {value!r}; pass precision={meant!r} instead")
        check_flags("engine", **{name: value})


def get_available_engine(
    *, cpu: bool = False, fp16: bool = False, amp: bool = False, apex: bool = False, ddp: bool = False,
    precision: str | None = None,
) -> IEngine:  # fmt: skip
    """Choose DataParallel for several CUDA GPUs, the GPU (CUDA, MPS or XPU) if there is one, else the CPU; DDP and
    precision by flag.

    Args:
        cpu: do not use a GPU.
        fp16: mixed precision in float16 with a gradient scaler, on any device.
        amp: mixed precision in the dtype that suits the device: bf16, or fp16 on CUDA GPUs that only emulate bf16.
        apex: mixed precision with NVIDIA Apex at opt_level O1; needs a GPU.
        ddp: one process per CUDA GPU, or 2 processes on the CPU of a machine without them.
        precision: "fp32", "fp16", "bf16", or "fp8" in linear layers and bf16 elsewhere, instead of a flag.
    Raises:
        ValueError: flags that contradict each other, or an unknown precision.

    >>> get_available_engine(cpu=True, amp=True)
    CPUEngine(device='cpu', rank=0, world_size=1)
    """
    check_engine_flags(cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp)
    if precision not in (None, *PRECISION_NAMES):
        found = f"precision must be one of {', '.join(PRECISION_NAMES)}, got {precision!r}"
        raise ValueError(found + suggested_precision(precision))
    given = [f"{name}=True" for name, flag in {"fp16": fp16, "amp": amp, "apex": apex}.items() if flag]
    given += [f"precision={precision!r}"] if precision is not None else []
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: choose one precision")
    if apex:
        if cpu:
            raise ValueError("cpu=True, apex=True: Apex needs a GPU; amp=True is torch's own mixed precision, anywhere")
        if ddp:
            return DistributedDataParallelAPEXEngine()
        return DataParallelAPEXEngine() if torch.cuda.device_count() > 1 else APEXEngine()
    name = "fp16" if fp16 else "amp" if amp else precision
    chosen = precision_by_name(name) if name is not None else None
    if ddp:
        return DistributedDataParallelEngine(device="cpu" if cpu else None, precision=chosen)
    if cpu or get_device().type == "cpu":
        return CPUEngine(precision=chosen)
    if torch.cuda.device_count() > 1:
        return DataParallelEngine(precision=chosen)
    return GPUEngine(precision=chosen)
