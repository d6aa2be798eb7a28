"""Numeric precision of the forward pass, the backward pass and the optimizer step.

An engine *has* a precision object, so that combining engines and precisions does not multiply classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.support.torch_internals import SKIPS_ITSELF, num_changes, step
from runnerkit.types import StateDict


class Precision(ABC):
    """The interface of precisions: set up in the process that trains, then used once per step."""

    def check(self) -> None:
        """Raise if this machine does not meet the requirements; called before processes are started."""

    @abstractmethod
    def setup(self, device: torch.device) -> None:
        """Create the state of this process, such as a gradient scaler; called when the device is known."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass, which can be entered repeatedly but not nested."""

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        """Change models and optimizers for this precision, before an engine wraps them."""
        return models, optimizers

    def release(self) -> None:
        """Undo :meth:`prepare`: return the trained objects to their original dtypes."""

    def unrounded(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values before :meth:`prepare` of those among `tensors` that it rounded, on any device."""
        return {}

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Accumulate the gradients of `loss`, a () tensor; under fp16 they are scaled."""

    def accumulate(self) -> AbstractContextManager[Any]:
        """Return the context of a backward pass whose gradients are accumulated for a later step."""
        return nullcontext()

    def collect(self, optimizer: Optimizer) -> None:
        """Move gradients of :meth:`accumulate` to where `optimizer` reads them, if they are stored elsewhere."""

    def parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters that `optimizer` updates, whose gradients are clipped."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def watch(self, optimizer: Optimizer) -> None:
        """Register an optimizer that will step on gradients of :meth:`backward`."""

    @abstractmethod
    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of `optimizer`, as clipping requires; at most once per step."""

    @abstractmethod
    def step(self, optimizer: Optimizer) -> bool:
        """Step `optimizer`; return False if the step was skipped because of non-finite gradients."""

    @property
    def skips_steps(self) -> bool:
        """True if steps with non-finite gradients are skipped, as a gradient scaler does."""
        return False

    def refresh(self) -> None:
        """Update copies of the weights after weights were loaded into the models."""

    def cleanup(self) -> None:
        """Restore the optimizers, also after an error; safe to call twice."""

    def state_dict(self) -> StateDict:
        """Return the state to resume from."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a :meth:`state_dict`."""


class FP32(Precision):
    """Full precision: every operation runs in the dtype of its inputs."""

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
        step(optimizer)
        return True


def computes_bf16(device: torch.device) -> bool:
    """Return whether `device` computes in bf16 itself; CUDA GPUs before Ampere emulate it, several times slower."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


class AMP(Precision):
    """Automatic mixed precision (``torch.autocast``), with a gradient scaler when it is fp16.

    Args:
        dtype: torch.float16 or torch.bfloat16; None uses bf16, which has the range of fp32 and does not need a scaler,
            but fp16 on CUDA GPUs that only emulate bf16 (older than Ampere).
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
        self._unscaled: dict[int, Optimizer] = {}  # by id, optimizers whose gradients are unscaled
        self._update_is_due = False
        self._holds_scaled_gradients = self._is_stepping = False
        self._watched: list[Optimizer] = []
        self._unscaled_parameters: set[int] = set()  # ids of those whose gradients are unscaled, of several optimizers
        self._versions: list[int] | None = None  # of their weights, at a backward pass in `handle_batch`
        self._undo = ExitStack()  # undoes the changes of :meth:`watch` to optimizers

    def setup(self, device: torch.device) -> None:
        self._unscaled.clear()
        self._unscaled_parameters.clear()
        self._update_is_due = self._holds_scaled_gradients = False
        self._versions = None
        self._device_type = device.type
        # Not stored in `dtype`: a later setup may use another type of device.
        self._compute_dtype = self.dtype or (torch.bfloat16 if computes_bf16(device) else torch.float16)
        needs_scaler = self._compute_dtype == torch.float16
        self._scaler = torch.amp.GradScaler(device.type, **self._scaler_arguments) if needs_scaler else None

    def autocast(self) -> AbstractContextManager[Any]:
        assert self._device_type is not None, "setup() comes first"
        # torch.autocast stores the state to restore on itself: it can be entered repeatedly, but not nested.
        return torch.autocast(self._device_type, dtype=self._compute_dtype)

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        for each in list(self._unscaled.values()):
            if all(parameter.grad is None for parameter in self.parameters(each)):  # reset without a step
                del self._unscaled[id(each)]
                self._update_is_due = True
        if self._versions is not None:
            self._check_not_moved_by_scaled()
        self._unscaled_parameters.clear()
        self._update_scale()
        self._holds_scaled_gradients = self._scaler is not None
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        assert self._device_type is not None, "setup() comes first"
        # In `handle_batch` autocast is on; an operation's backward uses the dtype of its forward anyway.
        with torch.autocast(self._device_type, enabled=False):
            scaled.backward()
        torch.clear_autocast_cache()  # a forward pass after it, within the region, may be of weights changed in place
        if self._scaler is not None and torch.is_autocast_enabled(self._device_type):
            self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [num_changes(each) for optimizer in self._watched for each in self.parameters(optimizer)]

    def _check_not_moved_by_scaled(self) -> None:
        """Raise if weights moved since the last backward pass, without a step, and its gradients are gone."""
        has_moved, self._versions = self._versions != self._versions_now(), None
        if has_moved and all(each.grad is None for one in self._watched for each in self.parameters(one)):
            raise RuntimeError(
                "weights were changed after self.engine.backward(loss), whose gradients are scaled for float16: call "
                "self.engine.unscale(optimizer) before you read them"
            )

    def watch(self, optimizer: Optimizer) -> None:
        # An autocast region, here `handle_batch`, casts weights once: without clearing its cache, a forward pass after
        # a step within the region would use the old weights.
        self._undo.callback(optimizer.register_step_post_hook(lambda *_: torch.clear_autocast_cache()).remove)
        if self._scaler is None:
            return
        self._watched.append(optimizer)
        self._undo.callback(self._watched.clear)
        self._undo.callback(optimizer.register_step_pre_hook(self._refuse_scaled_step).remove)
        if getattr(optimizer, SKIPS_ITSELF, False):  # a skipped step could not be detected
            setattr(optimizer, SKIPS_ITSELF, False)
            self._undo.callback(setattr, optimizer, SKIPS_ITSELF, True)

    def release(self) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        self._undo.close()

    def _refuse_scaled_step(self, *_: Any) -> None:
        if self._holds_scaled_gradients and not self._is_stepping:
            raise RuntimeError(
                "these gradients are scaled for float16: call self.engine.step(optimizer), not optimizer.step()"
            )

    def unscale(self, optimizer: Optimizer) -> None:
        self._versions = None
        if self._scaler is None or id(optimizer) in self._unscaled:
            return
        with self._without_unscaled(optimizer) if len(self._watched) > 1 else nullcontext():
            self._scaler.unscale_(optimizer)
        self._unscaled[id(optimizer)] = optimizer

    @contextmanager
    def _without_unscaled(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the scaler see zeros, or NaN, in place of the gradients that it unscaled for another optimizer."""
        parameters = [each for each in self.parameters(optimizer) if each.grad is not None]
        shared = [each for each in parameters if id(each) in self._unscaled_parameters]
        kept = [(each, each.grad) for each in shared if each.grad is not None]
        for each, gradient in kept:
            each.grad = gradient * 0  # not finite if the gradient is not: then this optimizer skips its step, too
        try:
            yield
        finally:
            for each, gradient in kept:
                each.grad = gradient
        self._unscaled_parameters.update(map(id, parameters))

    def step(self, optimizer: Optimizer) -> bool:
        if self._scaler is None:
            step(optimizer)
            return True
        if len(self._watched) > 1:  # alone, the scaler does it
            self.unscale(optimizer)
        # The scaler does not report if it skips; a hook detects it without another host synchronization.
        stepped: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        self._is_stepping = True
        try:
            self._scaler.step(optimizer)
        finally:
            self._is_stepping = False
            hook.remove()
        self._unscaled.pop(id(optimizer), None)
        self._versions = None
        self._update_is_due = True
        return bool(stepped)

    def _update_scale(self) -> None:
        # Deferred to the next backward: two optimizers must step on gradients of the same scale.
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


PRECISIONS: dict[str, Callable[[], Precision]] = {
    "fp32": FP32,
    "amp": AMP,
    "fp16": partial(AMP, torch.float16),
    "bf16": partial(AMP, torch.bfloat16),
}
