"""Mixed precision with NVIDIA Apex (``apex.amp``, up to release 25.05): opt_level O0 to O3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.engines.adapters.apex_changes import MasterWeights, PatchedAttributes, UnroundedValues
from runnerkit.engines.adapters.apex_package import import_part, native, require_apex
from runnerkit.precision import Precision
from runnerkit.support.function_members import FunctionMembers
from runnerkit.types import StateDict, parameters_of, shared_parameters

__all__ = ["Apex"]

_LEVELS = ("O0", "O1", "O2", "O3")


class Apex(Precision):
    """``apex.amp``: O0 is fp32, O1 casts around torch functions, O2 is fp16 with fp32 master weights, O3 is fp16.

    Apex modifies models and optimizers for the duration of a stage; afterwards they are restored, in fp32.

    Args:
        opt_level: "O0", "O1", "O2" or "O3", with the letter O.
        loss_scale: a number, or "dynamic"; None means dynamic under O1 and O2, and 1 under O0 and O3.
        keep_batchnorm_fp32: for O2 and O3; None means True under O2.
        float_functions: pairs such as ``(torch.nn.functional, "softplus")`` that O1 must run in fp32.
        amp_kwargs: further arguments of ``amp.initialize``.
        before_unscale: called with each optimizer after its backward pass, while gradients are still scaled; averages
            them if the backward pass itself does not.
        allow_cpu: run without a GPU if the installed Apex can; NVIDIA's cannot.
        engine: engine name used in error messages.

    >>> Apex("O2").skips_steps
    True
    """

    def __init__(
        self,
        opt_level: str = "O1",
        *,
        loss_scale: float | Literal["dynamic"] | None = None,
        keep_batchnorm_fp32: bool | None = None,
        float_functions: Sequence[tuple[Any, str]] = (),
        amp_kwargs: dict[str, Any] | None = None,
        before_unscale: Callable[[Optimizer], None] | None = None,
        allow_cpu: bool = False,
        engine: str = "APEXEngine",
    ) -> None:
        if opt_level not in _LEVELS:
            raise ValueError(f"opt_level must be one of {', '.join(_LEVELS)} (the letter O), got {opt_level!r}")
        if opt_level == "O1" and keep_batchnorm_fp32 is not None:
            raise ValueError("O1 runs batch norm in fp32 anyway: omit keep_batchnorm_fp32, or use O2 or O3")
        for module, name in float_functions:
            if not hasattr(module, name):
                raise ValueError(
                    f"float_functions: {FunctionMembers(module).own_name or module} lacks a function {name!r}"
                )
        if float_functions and opt_level != "O1":
            raise ValueError(f"float_functions are for O1, which casts around functions; opt_level is {opt_level}")
        fixed = {"opt_level", "loss_scale", "keep_batchnorm_fp32", "num_losses"} & (amp_kwargs or {}).keys()
        if fixed:
            raise ValueError(f"amp_kwargs must not contain {', '.join(sorted(fixed))}: the engine sets these")
        self.opt_level = opt_level
        self.loss_scale = loss_scale
        self.float_functions = tuple(float_functions)
        self.before_unscale = before_unscale
        self.allow_cpu = allow_cpu
        self.engine = engine
        self._options = {
            "verbosity": 0,  # Apex prints to stdout; skipped steps and the arguments are in the logs anyway
            **(amp_kwargs or {}),
            "opt_level": opt_level,
            "loss_scale": loss_scale,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
        }
        self._amp: ModuleType | None = None
        self._device = torch.device("cpu")
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._patches: list[PatchedAttributes] = []
        self._masters: list[MasterWeights] = []
        self._unrounded: UnroundedValues | None = None
        self._num_accumulating = 0
        self._delayed: dict[int, int] = {}  # optimizer's id -> loss_id of its gradients that are still scaled
        self._shared: dict[tuple[int, ...], list[Tensor]] = {}  # parameters by the positions of their optimizers

    def check(self) -> None:
        require_apex(engine=self.engine)
        if not self.allow_cpu and not torch.cuda.is_available():
            raise RuntimeError(
                f"{self.engine} needs an NVIDIA GPU, as Apex does, and torch sees none. {native(self.engine)}."
            )

    def setup(self, device: torch.device) -> None:
        self.check()
        self._device = device
        self._amp = import_part("amp")

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # Apex has already patched torch's functions (O1) or the model (other levels)

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        if not models:
            return models, optimizers
        self._shared = shared_parameters(optimizers.values())
        if self._shared and self.opt_level == "O2":
            raise ValueError(
                "a parameter belongs to several optimizers, for which O2 keeps a copy each: their steps would undo one "
                f"another; use O1. {native(self.engine)}."
            )
        patches = [PatchedAttributes(each) for each in (*models.values(), *optimizers.values())]
        for module, name in self.float_functions:
            self._apex.register_float_function(module, name)
        if self.opt_level in ("O2", "O3"):
            # Of what no optimizer steps on, Apex keeps no fp32 master weights.
            self._unrounded = UnroundedValues(models.values(), stepped={*parameters_of(*optimizers.values())})
        changed = self._initialize(list(models.values()), list(optimizers.values()))
        self._models, self._optimizers = changed
        for patch in patches:
            patch.record_changes()
        self._patches = patches
        self._masters = [MasterWeights(optimizer) for optimizer in self._optimizers]
        return dict(zip(models, self._models, strict=True)), dict(zip(optimizers, self._optimizers, strict=True))

    def _initialize(
        self, models: list[nn.Module], optimizers: list[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        # Each optimizer has its own loss, and so its own loss scale.
        options = {**self._options, "num_losses": max(1, len(optimizers))}
        try:
            if not optimizers:  # an infer stage: without optimizers, Apex returns the models only
                return self._apex.initialize(models, **options), []
            return self._apex.initialize(models, optimizers, **options)  # type: ignore[no-any-return]  # no types
        except RuntimeError as error:
            if self._device.type != "cuda":
                error.add_note(f"{self.engine} was asked to run on {self._device}. {native(self.engine)}.")
            raise

    def release(self) -> None:
        for masters in self._masters:
            masters.restore()
        for patch in self._patches:
            patch.restore()
        if self.opt_level in ("O2", "O3"):
            for model in self._models:
                model.float()
            if self._unrounded is not None:
                self._unrounded.restore()
            for optimizer in self._optimizers:
                optimizer.load_state_dict(optimizer.state_dict())  # casts its state to the dtype of its weights
        if self.opt_level == "O1" and self._models:
            # Enter and never exit: torch's functions stay patched in this process but must not cast any longer.
            self._apex.disable_casts().__enter__()
        self._models, self._optimizers, self._patches, self._masters = [], [], [], []
        self._unrounded, self._shared = None, {}
        self._delayed.clear()

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Accumulate gradients of `loss` for the parameters of `optimizer`, or of all optimizers."""
        optimizers = self._optimizers if optimizer is None else [optimizer]
        loss_id = self._loss_id(optimizer)
        if not self._num_accumulating:
            self._unscale(optimizers, loss_id, loss)
            return
        with self._apex.scale_loss(loss, list(optimizers), loss_id=loss_id, delay_unscale=True) as scaled:
            scaled.backward()
        for each in optimizers:
            self._delayed[id(each)] = loss_id

    def _unscale(self, optimizers: list[Optimizer], loss_id: int, loss: Tensor | None) -> None:
        """Backpropagate a loss, if there is one, and let Apex unscale the gradients, as it does when its context exits.

        It divides those of several optimizers once for each of them. So it gets copies, in which it finds overflows.
        """
        given = torch.zeros((), device=self._device) if loss is None else loss
        shared = self._shared_by(optimizers) if self._shared else []
        are_scaled = any(id(each) in self._delayed for each in optimizers)
        before = [None if are_scaled else each.grad for each in shared]  # as Apex does: from another loss
        for each in shared if not are_scaled else ():
            each.grad = None
        scale = self._apex.state_dict()[f"loss_scaler{loss_id}"]["loss_scale"] if shared else 1.0
        with self._apex.scale_loss(given, list(optimizers), loss_id=loss_id) as scaled:
            if loss is not None:
                scaled.backward()
            for one in optimizers:
                self._delayed.pop(id(one), None)
                if self.before_unscale is not None:
                    self.before_unscale(one)
            gradients = [each.grad for each in shared]
            for each in shared:
                each.grad = None if each.grad is None else each.grad.clone()
        for each, gradient, earlier in zip(shared, gradients, before, strict=True):
            own = None if gradient is None else gradient / scale
            each.grad = own if earlier is None else earlier if own is None else earlier + own

    def _shared_by(self, optimizers: list[Optimizer]) -> list[Tensor]:
        """Return the parameters that belong to several of these."""
        given = {position for position, each in enumerate(self._optimizers) if any(each is one for one in optimizers)}
        return [each for holders, group in self._shared.items() if len(given & {*holders}) > 1 for each in group]

    def _loss_id(self, optimizer: Optimizer | None) -> int:
        if optimizer is None:
            return 0
        for index, each in enumerate(self._optimizers):
            if each is optimizer:
                return index
        raise ValueError(f"this {type(optimizer).__name__} is not an optimizer of this stage, so Apex does not know it")

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._num_accumulating += 1
        try:
            yield
        finally:
            self._num_accumulating -= 1

    def collect(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._delayed:
            loss_id = self._delayed[id(optimizer)]
            # Shared gradients are unscaled for all their optimizers.
            together = [each for each in self._optimizers if self._delayed.get(id(each)) == loss_id]
            self._unscale(together if self._shared else [optimizer], loss_id, None)

    def unscale(self, optimizer: Optimizer) -> None:
        self.collect(optimizer)  # other gradients are unscaled after each backward pass

    def unrounded(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {} if self._unrounded is None else self._unrounded.of(tensors)

    def parameters(self, optimizer: Optimizer) -> list[Tensor]:
        return list(self._apex.master_params(optimizer))

    def step(self, optimizer: Optimizer) -> bool:
        self.collect(optimizer)
        # Apex replaces `step` when it skips one; only the original `step` runs this hook.
        stepped: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            optimizer.step()
        finally:
            hook.remove()
        return bool(stepped)

    @property
    def skips_steps(self) -> bool:
        return self.loss_scale == "dynamic" or (self.loss_scale is None and self.opt_level in ("O1", "O2"))

    def refresh(self) -> None:
        for masters in self._masters:
            masters.refresh()

    def state_dict(self) -> StateDict:
        if not self._models:
            return {}
        return {"apex": dict(self._apex.state_dict()), "masters": [masters.state() for masters in self._masters]}

    def load_state_dict(self, state: StateDict) -> None:
        if not self._models or "apex" not in state:
            return
        self._apex.load_state_dict(state["apex"])
        for masters, saved in zip(self._masters, state["masters"], strict=False):
            if masters.matches(saved):  # else another opt_level saved them, and the weights loaded before are kept
                masters.load(saved)

    @property
    def _apex(self) -> ModuleType:
        assert self._amp is not None, "call setup() first"
        return self._amp
