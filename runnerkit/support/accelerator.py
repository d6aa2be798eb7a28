"""The accelerator of this machine, as ``torch.accelerator`` reports it: CUDA, MPS, XPU or none."""

from __future__ import annotations

import torch
from torch import Tensor

_GPUS = ("cuda", "mps", "xpu")


def get_device() -> torch.device:
    """Return torch's accelerator (CUDA, MPS or XPU) if this machine has one, otherwise the CPU.

    >>> get_device().type in ("cpu", "cuda", "mps", "xpu")
    True
    """
    # Without the check, a torch built for CUDA names CUDA on machines without a GPU.
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def gpu_type() -> str:
    """Return the type of GPU that this torch is built for, such as "mps"; "cuda" if it is built for none."""
    accelerator = torch.accelerator.current_accelerator()
    return "cuda" if accelerator is None else accelerator.type


def is_missing(device: torch.device) -> bool:
    """Return whether `device` is a GPU of a type that torch does not see on this machine."""
    return device.type in _GPUS and not torch.get_device_module(device).is_available()


def gpu_names() -> list[str]:
    """Return the name of each GPU, in the order of their indices."""
    device = get_device()
    if device.type not in _GPUS:
        return []
    if device.type == "mps":
        return ["mps"]  # torch does not tell its name
    module = torch.get_device_module(device)
    return [module.get_device_name(index) for index in range(module.device_count())]


def gpu_rng_states() -> dict[str, list[Tensor]]:
    """Return the states of the generators on GPUs, one per GPU, by type of device; "cuda" is always a key."""
    states: dict[str, list[Tensor]] = {"cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
    if torch.xpu.is_available():
        states["xpu"] = torch.xpu.get_rng_state_all()
    if torch.mps.is_available():
        states["mps"] = [torch.mps.get_rng_state()]
    return states


def set_gpu_rng_states(states: dict[str, list[Tensor]]) -> None:
    """Restore the states from :func:`gpu_rng_states`; only those of GPUs that are visible now."""
    for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
    for index, state in enumerate(states.get("xpu", [])[: torch.xpu.device_count()]):
        torch.xpu.set_rng_state(state, index)
    if states.get("mps") and torch.mps.is_available():
        torch.mps.set_rng_state(states["mps"][0])
