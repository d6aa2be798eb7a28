"""Choice of an engine by flags or by the hardware of this machine."""

from __future__ import annotations

from typing import Any

import torch

from runnerkit.engine import IEngine
from runnerkit.engines.apex import APEXEngine, DataParallelAPEXEngine, DistributedDataParallelAPEXEngine
from runnerkit.engines.data_parallel import DataParallelEngine
from runnerkit.engines.ddp import DistributedDataParallelEngine
from runnerkit.engines.device import CPUEngine, GPUEngine
from runnerkit.errors import did_you_mean
from runnerkit.precision import PRECISIONS, Precision
from runnerkit.support.accelerator import default_device
from runnerkit.support.arguments import check_flags

__all__ = ["choose_engine", "get_available_engine"]

PRECISION_NAMES = (*PRECISIONS, "fp8")


def precision_by_name(name: str) -> Precision:
    """Return the precision of a name in `PRECISION_NAMES`."""
    if name == "fp8":
        from runnerkit.engines.adapters.float8 import Float8  # late, as few runs need it

        return Float8()
    return PRECISIONS[name]()


def suggested_precision(given: object) -> str:
    """Return the end of a message about an unknown precision, with the one that other libraries call so, if any.

    >>> suggested_precision("bf16-mixed"), suggested_precision(torch.float16), suggested_precision("double")
    ("; did you mean 'bf16'?", "; did you mean 'fp16'?", '')
    """
    same = _precision_called(given)
    return did_you_mean(given, PRECISION_NAMES) if same is None else f"; did you mean {same!r}?"


def _precision_called(given: object) -> str | None:
    """Return our name of a precision that other libraries call so; None if there is none."""
    name = str(given).lower().removeprefix("torch.").removesuffix("-mixed").removesuffix("-true")
    name = name.replace("bfloat", "bf").replace("float", "fp")
    same = {"half": "fp16", "16": "fp16", "32": "fp32", "8": "fp8"}.get(name, name)
    return same if same in PRECISION_NAMES else None


def check_engine_flags(**flags: Any) -> None:
    """Raise unless the flags that choose an engine are True or False; another value looks like an option of it.

    Raises:
        TypeError: with what to write instead.
    """
    for name, value in flags.items():
        if isinstance(value, int) and value > 1 and name == "ddp":
            instead = f"engine=dl.DistributedDataParallelEngine({value}) starts {value} processes"
            raise TypeError(f"ddp must be True or False, got {value}; {instead}")
        if name in ("fp16", "amp") and (meant := _precision_called(value)) is not None:
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
    if sum((fp16, amp, apex, precision is not None)) > 1:
        raise ValueError(f"fp16={fp16}, amp={amp}, apex={apex}, precision={precision!r}: choose one precision")
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
    if cpu or default_device().type == "cpu":
        return CPUEngine(precision=chosen)
    if torch.cuda.device_count() > 1:
        return DataParallelEngine(precision=chosen)
    return GPUEngine(precision=chosen)


def choose_engine(
    engine: IEngine | None = None,
    *,
    cpu: bool = False,
    fp16: bool = False,
    amp: bool = False,
    apex: bool = False,
    ddp: bool = False,
    precision: str | None = None,
) -> IEngine | None:
    """Return `engine`, or the engine that the flags ask for, or None without either.

    Args:
        engine: the user's engine, if any.
        cpu, fp16, amp, apex, ddp, precision: as in :func:`get_available_engine`.

    Raises:
        TypeError: `engine` is not an engine.
        ValueError: both `engine` and flags are given.
    """
    if engine is not None and not isinstance(engine, IEngine):
        raise TypeError(
            f"engine={engine!r} is not an engine; pass one, such as dl.DistributedDataParallelEngine(), or a flag, "
            "such as ddp=True"
        )
    flags = {"cpu": cpu, "fp16": fp16, "amp": amp, "apex": apex, "ddp": ddp}
    check_engine_flags(**flags)
    raised = [f"{name}=True" for name, flag in flags.items() if flag]
    if precision is not None:
        raised.append(f"precision={precision!r}")
    if engine is None:
        return get_available_engine(**flags, precision=precision) if raised else None
    if raised:
        raise ValueError(
            f"engine={type(engine).__name__} and {', '.join(raised)} contradict each other; give either engine or flags"
        )
    return engine
