"""Notice gradients that an engine does not average over processes, before an optimizer steps on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.engine import IEngine
from runnerkit.types import parameters_of

_TOLERANCE = 1e-4  # of a gradient's norm; ranks that were not averaged differ by more
_MOST_NAMES = 5
_LATE = (
    "They were frozen, or not yet in the model and the optimizer, when the stage began and the engine wrapped it. Let "
    "get_model return them trainable, with FreezeCallback until they are to train, or change the model in another "
    "stage, whose get_model returns it as it is"
)
_METHODS = (
    "Gradients are averaged in the first backward pass after each self.model(...). Call no other method of the model "
    "to train, as in self.engine.unwrap(self.model).encode(x), but let forward choose: self.model(x, part='encode'). "
    "Add up the losses of one forward pass for one backward pass"
)
_UNUSED = (
    "If a forward pass leaves parameters unused, no gradient is averaged, and {} are missing. Use them in each "
    "step, freeze them, or {}. Otherwise: "
)


@dataclass
class _Checked:
    num_parameters: int
    frozen: list[Tensor]


class ExchangeWatch:
    """A comparison of the parameters whose gradients an engine averages with the parameters that optimizers step.

    Each step looks at the parameters that were frozen and at the number of parameters; the first one of an optimizer in
    each training pass at all of its parameters and, if `compares`, at the gradients of all ranks.

    Args:
        compares: gradients must be equal on all ranks.
    Attributes:
        allows_unused: what the user can do to leave parameters unused, as an imperative.
    """

    def __init__(self, engine: IEngine, *, compares: bool) -> None:
        self.compares = compares
        self.allows_unused = "let the engine allow it"
        self._engine = engine
        self._modules: Mapping[str, nn.Module] = {}
        self._exchanged: set[Tensor] = set()
        self._checked: dict[Any, _Checked] = {}  # by optimizer, in this training pass
        self._hooks = ExitStack()
        self._is_silent = self._was_silent = self._is_paused = False

    def open(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Iterable[Any],
        *,
        exchanged: Iterable[Tensor] | None = None,
    ) -> None:
        """Watch the optimizers of a stage.

        Args:
            modules: the modules that hold the parameters in training, by key.
            exchanged: those whose gradients the engine averages; None means all that require gradients now.
        """
        self.close()
        optimizers = [*optimizers]
        self._modules = modules
        if exchanged is None:
            held = chain(*(each.parameters() for each in modules.values()), parameters_of(*optimizers))
            exchanged = (each for each in held if each.requires_grad)
        self._exchanged = {*exchanged}
        for each in optimizers:
            if isinstance(each, Optimizer):
                self._hooks.callback(each.register_step_pre_hook(lambda optimizer, *_: self.check(optimizer)).remove)

    def close(self) -> None:
        """Forget everything; safe to call twice."""
        self._hooks.close()
        self._modules, self._exchanged, self._checked = {}, set(), {}

    def enter_loader(self) -> None:
        """Look at everything once more; called at the start of a training pass."""
        self._checked = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look at steps that each rank makes alone."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Expect backward passes in this context to leave each rank its own gradients."""
        self._is_silent = self._was_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def note_backward(self) -> None:
        """Note a backward pass; a step is compared unless the last one before it was silent."""
        self._was_silent = self._is_silent

    def is_due(self, optimizer: Any) -> bool:
        """Return whether `optimizer` has not stepped in this training pass."""
        return optimizer not in self._checked and not self._is_paused

    def check(self, optimizer: Any) -> None:
        """Raise if `optimizer` is about to step on gradients of this rank only; every rank must call this.

        Raises:
            ValueError: with the names of the parameters, and what to do.
        """
        if self._is_paused:
            return
        checked = self._checked.get(optimizer)
        if (
            checked is None
            or checked.num_parameters != sum(len(group["params"]) for group in optimizer.param_groups)
            or any(each.requires_grad for each in checked.frozen)
        ):
            self._check_all(optimizer, is_first=checked is None)

    def _check_all(self, optimizer: Any, *, is_first: bool) -> None:
        parameters = [*parameters_of(optimizer)]
        with_gradient = [each for each in parameters if each.grad is not None]
        late = [each for each in with_gradient if each.requires_grad and each not in self._exchanged]
        if late:
            raise ValueError(f"{self._named(late)} would not be averaged over processes. {_LATE}")
        if is_first and (not with_gradient or self._was_silent):
            return  # look at the next step
        if is_first and self.compares:
            self._compare(parameters)
        frozen = [each for each in parameters if not each.requires_grad]
        self._checked[optimizer] = _Checked(len(parameters), frozen)

    def _compare(self, parameters: list[Tensor]) -> None:
        mine = torch.stack([_measured(each.grad, self._engine.device) for each in parameters])  # (P, 2)
        highest, lowest = self._engine.reduce(torch.cat([mine, -mine], dim=1), "max").split(2, dim=1)
        differ = (highest + lowest).amax(dim=1) > _TOLERANCE * highest[:, 0].abs()
        unlike = [each for each, is_unlike in zip(parameters, differ.tolist(), strict=True) if is_unlike]
        if unlike:
            unused = [each for each in parameters if each.requires_grad and each.grad is None]
            hint = _UNUSED.format(self._named(unused), self.allows_unused) if unused else ""
            raise ValueError(f"{self._named(unlike)} differ between ranks in a step. {hint}{_METHODS}")

    def check_unused(self, modules: Iterable[nn.Module]) -> None:
        """Raise if modules, of which the engine trains copies, have gradients.

        Raises:
            ValueError: with the names of their parameters, and what to do.
        """
        named: dict[Tensor, str] = {
            each: name for module in modules for name, each in module.named_parameters() if each.grad is not None
        }
        if named:
            raise ValueError(
                f"{_listed(named, named)} are those of the user's module, which does not train. {_METHODS}"
            )

    def _named(self, parameters: Collection[Tensor]) -> str:
        names: dict[Tensor, str] = {
            parameter: f"{key}.{name}" if key else name
            for key, module in self._modules.items()
            for name, parameter in module.named_parameters()
        }
        return _listed(parameters, names)


def _listed(parameters: Collection[Tensor], names: Mapping[Tensor, str]) -> str:
    found = [repr(names.get(each, f"one of shape {tuple(each.shape)}")) for each in islice(parameters, _MOST_NAMES)]
    more = ", ..." if len(parameters) > _MOST_NAMES else ""
    return f"the gradients of {len(parameters)} parameters ({', '.join(found)}{more})"


def _measured(gradient: Tensor | None, device: torch.device) -> Tensor:
    """Return norm and sum of a gradient, (2,) float64, finite; the norm is -1 without a gradient."""
    if gradient is None:
        return torch.tensor([-1.0, 0.0], dtype=torch.float64, device=device)
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    both = torch.stack([torch.linalg.vector_norm(values, dtype=torch.float64), values.sum(dtype=torch.float64)])
    return both.nan_to_num(nan=-2.0, posinf=-3.0, neginf=-4.0).to(device)
