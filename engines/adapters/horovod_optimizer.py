"""Optimizers whose gradients Horovod averages between the backward pass and the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.engines.communicators.horovod import SendableGradients, import_horovod
from runnerkit.types import StateDict, parameters_of

Operation: TypeAlias = Literal["average", "sum", "adasum"]

_NEVER = 2**31  # backward passes until gradients are sent
_NOT_CARRIED = {"state", "param_groups", "step"}  # the state dict holds the first two; a scheduler may wrap the last


class DistributedStep:
    """The user's optimizer, Horovod's wrapper of it, and the state of the gradients between backward and step.

    Horovod sends each gradient during the backward pass, as soon as it is complete, and waits for all of them in
    ``synchronize()``.

    Args:
        original: the user's optimizer.
        names: names of the models' parameters, unique and the same on all ranks.
        state: the optimizer's state dict, the same on all ranks.
        compression, op, gradient_predivide_factor: see :class:`runnerkit.engines.HorovodEngine`.
        shared: steps that send the gradients of those parameters which other optimizers hold, too.

    Attributes:
        optimizer: Horovod's wrapper of `original`.

    Raises:
        TypeError: Horovod cannot wrap an optimizer of this class.
    """

    def __init__(
        self,
        original: Optimizer,
        *,
        names: dict[Tensor, str],
        state: StateDict,
        compression: Literal["fp16"] | None,
        op: Operation,
        gradient_predivide_factor: float = 1.0,
        shared: Sequence[DistributedStep] = (),
    ) -> None:
        hvd = import_horovod()
        self._original = original
        self._op = op
        self._num_processes: int = hvd.size()
        self._steps_in_backward = op == "adasum" and self._num_processes > 1
        self._is_whole = False  # whether gradients are reduced over all processes
        self._shared = shared
        sent_elsewhere = {each for one in shared for each in one.parameters}
        held = [*parameters_of(original)]
        self.parameters: list[Tensor] = [each for each in held if each not in sent_elsewhere]
        try:
            with _frozen(each for each in held if each in sent_elsewhere):  # Horovod gives them no hook
                self.optimizer: Any = hvd.DistributedOptimizer(
                    original,
                    named_parameters=[(names.get(each, f"{i}"), each) for i, each in enumerate(held)],
                    compression=SendableGradients(hvd.Compression.fp16 if compression else hvd.Compression.none),
                    op={"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}[op],
                    gradient_predivide_factor=gradient_predivide_factor,
                )
        except TypeError as error:
            raise TypeError(
                f"Horovod cannot wrap a {type(original).__qualname__}: it constructs a new one from the parameter "
                f"groups only ({error}); give all other arguments of __init__ defaults"
            ) from error
        carried = {name: value for name, value in vars(original).items() if name not in _NOT_CARRIED}
        vars(self.optimizer).update(carried)  # hooks too: they belong to both
        self.optimizer.load_state_dict(state)
        self._complete_class()

    def _complete_class(self) -> None:
        # Horovod creates a class for this one object. Its step() runs the user's hooks twice (torch calls them around
        # it and around the inner one) and sends synchronized gradients again; its zero_grad() takes no argument and
        # refuses gradients in flight, which a GAN leaves in its discriminator. These replacements do neither.
        own: Any = type(self.optimizer)
        self._wait_for_all: Callable[[Optimizer], None] = own.synchronize
        own.zero_grad = lambda _, set_to_none=True: self._zero_grad(set_to_none)
        if not self._steps_in_backward:
            horovod_step: Callable[..., Any] = own.step.__wrapped__  # without torch's hooks
            own.synchronize = lambda _: self.synchronize()
            own.step = lambda _, closure=None: self._step(horovod_step, closure)

    def _step(self, horovod_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            self.synchronize()
        with self.optimizer.skip_synchronize():
            result = horovod_step(self.optimizer, None if closure is None else lambda: self._evaluate(closure))
        self._is_whole = False
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        return loss

    def _zero_grad(self, set_to_none: bool) -> None:
        for each in (*self._shared, self):
            each._discard()
        type(self._original).zero_grad(self.optimizer, set_to_none)

    def _discard(self) -> None:
        if self._is_sending():
            if self._steps_in_backward:
                raise RuntimeError("op='adasum' steps during backward: call step() before zero_grad()")
            self._wait_for_all(self.optimizer)  # Horovod writes into these gradients
        elif self._handles:  # from backward passes without a step
            self._handles.clear()
            self.optimizer.set_backward_passes_per_step(self.optimizer.backward_passes_per_step)
        self._is_whole = False

    @property
    def _handles(self) -> dict[Any, tuple[Any, Any]]:
        # Keyed by parameter that had a backward pass; the handle is None while its gradient is not sent yet. Private
        # in Horovod, whose last release was in 2023.
        handles: dict[Any, tuple[Any, Any]] = self.optimizer._handles
        return handles

    def _is_sending(self) -> bool:
        return any(handle is not None for handle, _ in self._handles.values())

    def holds_any_of(self, model: nn.Module) -> bool:
        """Return whether the optimizer updates a parameter of `model`."""
        of_model = {id(parameter) for parameter in model.parameters()}
        return any(id(parameter) in of_model for parameter in self.parameters)

    def before_backward(self) -> None:
        """Prepare for another backward pass, which adds to gradients that may be in flight or already averaged."""
        if self._is_sending():
            self.synchronize()  # a second loss, before the step
        if self._is_whole and self._op == "sum":
            # Each rank holds the full sum, which is going to be summed over ranks once more.
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self._num_processes)
        self._is_whole = False

    def synchronize(self) -> None:
        """Wait until gradients are reduced over all processes; idempotent; every rank must call this."""
        for each in self._shared:
            each.synchronize()
        if not self._steps_in_backward and (self._handles or not self._is_whole):
            self._wait_for_all(self.optimizer)
            self._is_whole = True

    @contextmanager
    def without_communication(self) -> Iterator[None]:
        """Keep the gradients of backward passes in this context local; a later pass sends them."""
        self.optimizer.set_backward_passes_per_step(_NEVER)
        try:
            yield
        finally:
            self.optimizer.set_backward_passes_per_step(1)

    def release(self) -> Optimizer:
        """Return the user's optimizer with the state of Horovod's, which must not be used afterwards."""
        self.remove_hooks()
        self._original.load_state_dict(self.optimizer.state_dict())
        return self._original

    def remove_hooks(self) -> None:
        """Remove Horovod's hooks from the parameters, so that another optimizer can use them."""
        # A loss that is still referenced keeps the hooks in its graph; they do nothing until it is freed.
        self.optimizer.set_backward_passes_per_step(_NEVER)
        self.optimizer._grad_accs.clear()


@contextmanager
def _frozen(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters not require gradients for a moment."""
    trained = [each for each in parameters if each.requires_grad]
    for each in trained:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in trained:
            each.requires_grad_()
