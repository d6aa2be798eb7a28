"""Stand-ins for accelerators that this machine lacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


def show(monkeypatch: pytest.MonkeyPatch, kind: str | None, *, count: int = 1, is_there: bool = True) -> None:
    """Make torch report `count` accelerators of type `kind`, or none.

    Args:
        is_there: whether they are there at run time; otherwise torch is only built for them.
    """

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if kind is None or (check_available and not is_there) else torch.device(kind)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    for each in ("cuda", "mps", "xpu"):
        module = torch.get_device_module(each)
        num_seen = count if each == kind and is_there else 0
        monkeypatch.setattr(module, "is_available", lambda num=num_seen: num > 0)
        monkeypatch.setattr(module, "device_count", lambda num=num_seen: num)
        monkeypatch.setattr(module, "get_device_name", lambda index: f"GPU {index}", raising=False)
    properties = SimpleNamespace(has_fp64=False)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)


class Generators:
    """The states of an accelerator's generators, which torch reads and sets here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, *, count: int) -> None:
        self.states = [torch.tensor([index], dtype=torch.uint8) for index in range(count)]
        module = torch.get_device_module(kind)
        monkeypatch.setattr(module, "get_rng_state_all", lambda: list(self.states), raising=False)
        monkeypatch.setattr(module, "get_rng_state", lambda index=0: self.states[index])
        monkeypatch.setattr(module, "set_rng_state", self._set)

    def _set(self, state: torch.Tensor, index: int = 0) -> None:
        self.states[index] = state


class _OnTheHost(TorchFunctionMode):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        if any(self._is_there(value) for value in values):
            self.num_calls += 1
            if torch.float64 in values:
                raise TypeError(f"{self.kind} does not support float64")
            args = [self._moved(value) for value in args]
            kwargs = {key: self._moved(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def _moved(self, value: Any) -> Any:
        return torch.device("cpu") if self._is_there(value) else value

    def _is_there(self, value: Any) -> bool:
        return isinstance(value, torch.device) and value.type == self.kind


@contextmanager
def on_the_host(kind: str) -> Iterator[_OnTheHost]:
    """Keep tensors for devices of type `kind` in host memory, and raise when one of them would be float64."""
    with _OnTheHost(kind) as mode:
        yield mode
