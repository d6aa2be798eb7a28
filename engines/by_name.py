"""Engines by name, for scripts, command lines and configs, and the choice between an engine and flags."""

from __future__ import annotations

import inspect
import json
import os
import re
from typing import Any

from runnerkit import engines
from runnerkit.engine import IEngine
from runnerkit.engines.choose import check_engine_flags, get_available_engine
from runnerkit.engines.data_parallel import DataParallelEngine
from runnerkit.engines.ddp import DistributedDataParallelEngine
from runnerkit.engines.device import CPUEngine, GPUEngine
from runnerkit.engines.fsdp import FullyShardedDataParallelEngine
from runnerkit.engines.horovod import HorovodEngine
from runnerkit.engines.launch.process_group_engine import ProcessGroupEngine
from runnerkit.engines.launch.ray_launcher import RayLauncher
from runnerkit.errors import did_you_mean
from runnerkit.precision_names import precision_by_name
from runnerkit.support.accelerator import get_device

__all__ = ["choose_engine"]

VARIABLE = "RUNNERKIT_ENGINE"  # arguments of :func:`engine_by_name` as JSON, for a script that another process starts

ENGINES: dict[str, type[IEngine]] = {
    "cpu": CPUEngine,
    "gpu": GPUEngine,
    "dp": DataParallelEngine,
    "ddp": DistributedDataParallelEngine,
    "fsdp": FullyShardedDataParallelEngine,
    "horovod": HorovodEngine,
    **{name: getattr(engines, name) for name in dir(engines) if name.endswith("Engine") and name != "IEngine"},
}


def engine_by_name(
    name: str | None,
    *,
    num_processes: int | tuple[int, int] | None = None,
    precision: str | None = None,
    launcher: RayLauncher | str | None = None,
) -> IEngine:
    """Create an engine from its name.

    Args:
        name: a short name or a class name; None means DDP if `num_processes` is given, else what suits this machine.
        num_processes: for multi-process engines; None means their default; (least, most) with a launcher.
        precision: "fp32", "fp16", "bf16", "fp8" (in linear layers), or "amp", which is bf16, or fp16 on GPUs that only
            emulate it.
        launcher: of the processes; "ray" is a RayLauncher with its defaults.
    Raises:
        ValueError: an unknown name, or arguments that the engine does not accept; the message lists the valid ones.

    >>> engine_by_name("ddp", num_processes=3, precision="bf16").num_processes
    3
    """
    if name is None:
        name = "ddp" if num_processes is not None or launcher is not None else type(get_available_engine()).__name__
    if name not in ENGINES:
        found = f"unknown engine {name!r}; expected one of {', '.join(ENGINES)}"
        is_device = re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", name) is not None
        raise ValueError(found + (f"; write dl.DeviceEngine({name!r})" if is_device else did_you_mean(name, ENGINES)))
    engine, options = ENGINES[name], dict[str, Any]()
    if engine is GPUEngine and get_device().type == "cpu":
        raise ValueError(f"engine {name!r} needs a GPU and torch sees none; use 'cpu'")
    if num_processes is not None:
        if "num_processes" not in inspect.signature(engine).parameters:
            raise ValueError(
                f"engine {name!r} runs in one process, so it does not accept num_processes, got {num_processes}; use "
                "'ddp', 'fsdp' or 'horovod' for several"
            )
        if not isinstance(num_processes, tuple | list) and num_processes < 1:
            raise ValueError(f"the number of processes must be >= 1, got {num_processes}")
        options["num_processes"] = num_processes
    if launcher is not None:
        if isinstance(launcher, str) and launcher != "ray":
            raise ValueError(f"unknown launcher {launcher!r}; expected 'ray' or a RayLauncher")
        if not issubclass(engine, ProcessGroupEngine):
            raise ValueError(f"engine {name!r} does not accept a launcher, got {launcher!r}; use 'ddp' or 'fsdp'")
        if num_processes is None:
            raise ValueError(f"launcher {launcher!r} needs the number of processes in the cluster: pass nproc")
        options["launcher"] = RayLauncher() if launcher == "ray" else launcher
    elif isinstance(num_processes, tuple | list):
        raise ValueError(
            f"the number of processes must be one number without a launcher, got {num_processes}; pass one, or also "
            "launcher='ray'"
        )
    if precision is not None:
        options["precision"] = precision_by_name(precision)
        if "AMP" in engine.__name__ or "APEX" in engine.__name__:
            raise ValueError(
                f"engine {name!r} has a fixed precision, got precision={precision!r}; use 'ddp' or another engine "
                "without one"
            )
    return engine(**options)


def named_engine(engine: IEngine | str) -> IEngine:
    """Return an engine that is given itself or by its name.

    Raises:
        TypeError: it is neither.
    """
    _check_engine(engine)
    return engine_by_name(engine) if isinstance(engine, str) else engine


def _check_engine(engine: Any) -> None:
    if isinstance(engine, type):
        raise TypeError(f"engine is the class {engine.__name__}; pass an instance of it: {engine.__name__}(...)")
    if not isinstance(engine, IEngine | str):
        raise TypeError(
            f"engine={engine!r} is not an engine; pass a name, such as 'ddp', an engine, such as "
            "dl.DistributedDataParallelEngine(), or a flag, such as ddp=True"
        )


def choose_engine(
    engine: IEngine | str | None = None,
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
        engine: the user's engine, or its name, if any; only with a name `precision` may be given too.
        cpu, fp16, amp, apex, ddp, precision: as in :func:`get_available_engine`.

    Raises:
        TypeError: `engine` is not an engine or a name.
        ValueError: both `engine` and flags are given, or a name is unknown.

    >>> choose_engine("cpu", precision="bf16").precision.dtype
    torch.bfloat16
    """
    if engine is not None:
        _check_engine(engine)
    flags = {"cpu": cpu, "fp16": fp16, "amp": amp, "apex": apex, "ddp": ddp}
    check_engine_flags(**flags)
    raised = [f"{name}=True" for name, flag in flags.items() if flag]
    if engine is None:
        return get_available_engine(**flags, precision=precision) if raised or precision is not None else None
    if raised:
        shown, instead = type(engine).__name__, "give either engine or flags"
        if isinstance(engine, str):
            wanted = precision or ("fp16" if fp16 else "amp" if amp else None)
            shown, instead = repr(engine), f"write engine={engine!r}, precision={wanted!r}" if wanted else instead
        raise ValueError(f"engine={shown} and {', '.join(raised)} contradict each other; {instead}")
    if precision is not None and not isinstance(engine, str):
        shown = type(engine).__name__
        raise ValueError(
            f"engine={shown} and precision={precision!r} contradict each other; an engine takes its own, such as "
            f"dl.{shown}(precision={precision!r})"
        )
    return engine_by_name(engine, precision=precision) if isinstance(engine, str) else engine


def commanded_engine() -> IEngine | None:
    """Create the engine that ``runnerkit run SCRIPT.py --engine ...`` asks for; it overrides the script's own."""
    command = os.environ.get(VARIABLE)
    return None if command is None else engine_by_name(**json.loads(command))
