"""Numeric precision: what happens around the forward pass, and between the loss and the step.

An engine *holds* a precision object, so that engines times precisions needs no product of classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.types import StateDict


class Precision(ABC):
    """The contract: set up in the process that trains, then used once a step."""

    def check(self) -> None:
        """Refuse a machine that lacks what this precision needs; called before processes are started."""

    @abstractmethod
    def setup(self, device: torch.device) -> None:
        """Make what belongs to this process (a gradient scaler); called once the device is known."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Context of the forward pass; may be entered again after it was left."""

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        """Change models and optimizers for this precision, before an engine wraps them."""
        return models, optimizers

    def release(self) -> None:
        """Undo :meth:`prepare`: the user's objects, trained, in the type that they came in."""

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Accumulate the gradients of `loss`, a () tensor; under fp16 they are scaled."""

    def accumulate(self) -> AbstractContextManager[Any]:
        """Context of a backward pass that no step follows yet."""
        return nullcontext()

    def collect(self, optimizer: Optimizer) -> None:
        """Bring gradients of :meth:`accumulate` to where `optimizer` reads them, if they wait elsewhere."""

    def parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """List what `optimizer` updates, whose gradients clipping changes."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def watch(self, optimizer: Optimizer) -> None:
        """Be told of an optimizer that steps on gradients of :meth:`backward`."""

    @abstractmethod
    def unscale(self, optimizer: Optimizer) -> None:
        """Make `optimizer`'s gradients true ones, as clipping needs; once a step at most."""

    @abstractmethod
    def step(self, optimizer: Optimizer) -> bool:
        """Step `optimizer`; False when the step was skipped for gradients that are not finite."""

    @property
    def skips_steps(self) -> bool:
        """Whether a non-finite gradient is part of normal work here."""
        return False

    def refresh(self) -> None:
        """Be told that weights were loaded into the models."""

    def cleanup(self) -> None:
        """Leave the optimizers as they came, whatever happened; safe to call twice."""

    def state_dict(self) -> StateDict:
        """State to resume from."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Take back :meth:`state_dict`."""


class FP32(Precision):
    """Full precision: every operation in the type of its inputs."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def setup(self, device: torch.device) -> None:
        pass

    def autocast(self) -> AbstractContextManager[Any]:
        return self._nothing

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> None:
        pass

    def step(self, optimizer: Optimizer) -> bool:
        optimizer.step()
        return True


# A fused optimizer says by this that it unscales and skips within its kernel, where nobody learns of a skipped step.
# The scaler reads it off the object.
_SKIPS_ITSELF = "_step_supports_amp_scaling"


class AMP(Precision):
    """Automatic mixed precision (``torch.autocast``), with a gradient scaler when it is fp16.

    Args:
        dtype: torch.float16 or torch.bfloat16; None takes fp16 on CUDA and bf16 elsewhere
            (bf16 has the range of fp32 and needs no scaler; CPUs have no fast fp16).
        scaler: arguments of ``torch.amp.GradScaler``, such as ``{"init_scale": 2.0**10}``.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, scaler: dict[str, Any] | None = None) -> None:
        if dtype not in (None, torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float16, torch.bfloat16 or None, got {dtype}")
        self.dtype = dtype
        self._scaler_arguments = scaler or {}
        self._scaler: torch.amp.GradScaler | None = None
        self._device_type: str | None = None
        self._compute_dtype: torch.dtype | None = None
        self._unscaled: dict[int, Optimizer] = {}  # by id, those whose gradients are true ones by now
        self._update_is_due = False
        self._holds_scaled_gradients = self._is_stepping = False
        self._undo = ExitStack()  # what :meth:`watch` did to optimizers

    def setup(self, device: torch.device) -> None:
        self._unscaled.clear()
        self._update_is_due = self._holds_scaled_gradients = False
        self._device_type = device.type
        # Not kept in `dtype`: a later setup may be for another kind of device.
        self._compute_dtype = self.dtype or (torch.float16 if device.type == "cuda" else torch.bfloat16)
        needs_scaler = self._compute_dtype == torch.float16
        self._scaler = torch.amp.GradScaler(device.type, **self._scaler_arguments) if needs_scaler else None

    def autocast(self) -> AbstractContextManager[Any]:
        assert self._device_type is not None, "setup() comes first"
        # It keeps the state to go back to on itself: it may be entered again, but not within itself.
        return torch.autocast(self._device_type, dtype=self._compute_dtype)

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        for each in list(self._unscaled.values()):
            if all(parameter.grad is None for parameter in self.parameters(each)):  # left without a step
                del self._unscaled[id(each)]
                self._update_is_due = True
        self._update_scale()
        self._holds_scaled_gradients = self._scaler is not None
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        assert self._device_type is not None, "setup() comes first"
        # In `handle_batch` autocast is on; each operation's backward has the type of its forward anyway.
        with torch.autocast(self._device_type, enabled=False):
            scaled.backward()

    def watch(self, optimizer: Optimizer) -> None:
        # Within one autocast region, which `handle_batch` is, weights are cast once: a forward pass after a step there
        # would take those from before it.
        self._undo.callback(optimizer.register_step_post_hook(lambda *_: torch.clear_autocast_cache()).remove)
        if self._scaler is None:
            return
        self._undo.callback(optimizer.register_step_pre_hook(self._refuse_scaled_step).remove)
        if getattr(optimizer, _SKIPS_ITSELF, False):
            setattr(optimizer, _SKIPS_ITSELF, False)
            self._undo.callback(setattr, optimizer, _SKIPS_ITSELF, True)

    def release(self) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        self._undo.close()

    def _refuse_scaled_step(self, *_: Any) -> None:
        if self._holds_scaled_gradients and not self._is_stepping:
            raise RuntimeError(
                "these gradients are scaled, as float16 needs: call self.engine.step(optimizer), not optimizer.step()"
            )

    def unscale(self, optimizer: Optimizer) -> None:
        if self._scaler is not None and id(optimizer) not in self._unscaled:
            self._scaler.unscale_(optimizer)
            self._unscaled[id(optimizer)] = optimizer

    def step(self, optimizer: Optimizer) -> bool:
        if self._scaler is None:
            optimizer.step()
            return True
        # Whether the scaler skips is known only inside it; a hook tells without asking the device again.
        stepped: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        self._is_stepping = True
        try:
            self._scaler.step(optimizer)
        finally:
            self._is_stepping = False
            hook.remove()
        self._unscaled.pop(id(optimizer), None)
        self._update_is_due = True
        return bool(stepped)

    def _update_scale(self) -> None:
        # Put off until the next backward: with two optimizers both step on gradients of one scale.
        if self._scaler is not None and self._update_is_due:
            self._scaler.update()
            self._update_is_due = False

    @property
    def skips_steps(self) -> bool:
        return self._scaler is not None

    def state_dict(self) -> StateDict:
        self._update_scale()
        return {} if self._scaler is None else {"scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
