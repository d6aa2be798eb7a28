"""Modules chosen by class whose activations are recomputed in the backward pass, or that are compiled one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from runnerkit.models.parameters import check_shapes
from runnerkit.support.torch_internals import BatchNorm

Classes = Sequence[type[nn.Module]]


class Regions:
    """Modules of a model that are recomputed or compiled; :meth:`enter` replaces their class.

    A subclass takes the place of each module's class, so that copies of the module, such as a sharded one, run in the
    same way, hooks run around it, and all modules of a class share one compilation.

    Args:
        checkpointed: classes whose activations are not kept for the backward pass, but recomputed in it.
        kept_ops: operations whose results are kept nevertheless, such as ``torch.ops.aten.mm.default``.
        compiled: classes whose forward passes are compiled.
        compile_arguments: of ``torch.compile``.
    """

    def __init__(
        self,
        *,
        checkpointed: Classes = (),
        kept_ops: Sequence[Any] = (),
        compiled: Classes = (),
        compile_arguments: dict[str, Any] | None = None,
    ) -> None:
        self.checkpointed, self.kept_ops, self.compiled = tuple(checkpointed), list(kept_ops), tuple(compiled)
        self.compile_arguments = compile_arguments or {}
        self._made: dict[type[nn.Module], type[nn.Module]] = {}
        self._entered: list[tuple[nn.Module, type[nn.Module]]] = []

    def enter(self, models: Iterable[nn.Module]) -> None:
        """Change the class of the chosen modules until :meth:`leave`.

        Raises:
            ValueError: no model has a module of a class, or a module has a ``forward`` of its own or is lazy.
        """
        models = list(models)
        for name, classes in (("checkpoint_modules", self.checkpointed), ("compile's modules", self.compiled)):
            check_classes(name, classes, models)
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, (*self.checkpointed, *self.compiled)) and not hasattr(module, "_region_of"):
                if "forward" in vars(module):
                    raise ValueError(
                        f"a {type(module).__name__} has a forward of its own, not that of its class, and can be "
                        "neither checkpointed nor compiled as a region: choose another class"
                    )
                kind = type(module)
                if issubclass(kind, LazyModuleMixin):  # it changes its class in the first batch
                    check_shapes(module, f"{kind.__name__} in checkpoint_modules or compile's modules")
                self._entered.append((module, kind))
                module.__class__ = self._subclass_of(kind)

    def leave(self) -> None:
        """Give all modules their class again."""
        for module, kind in self._entered:
            module.__class__ = kind
        self._entered.clear()

    def _subclass_of(self, kind: type[nn.Module]) -> type[nn.Module]:
        if kind not in self._made:
            forward: Callable[..., Any] = kind.forward
            if issubclass(kind, self.checkpointed):
                forward = recomputing(forward, self.kept_ops)
            if issubclass(kind, self.compiled):
                forward = torch.compile(forward, **self.compile_arguments)
            names = {"forward": forward, "_region_of": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
            self._made[kind] = type(kind.__name__, (kind,), names)
        return self._made[kind]


def recomputing(forward: Callable[..., Any], kept_ops: list[Any]) -> Callable[..., Any]:
    """Return a ``forward`` that keeps its inputs and the results of `kept_ops`, and computes the rest again."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        options: dict[str, Any] = {}
        if kept_ops:
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept_ops)
        norms = [each for each in self.modules() if isinstance(each, BatchNorm) and each.track_running_stats]
        if norms and self.training:
            options["context_fn"] = functools.partial(_contexts, norms, options.get("context_fn"))
        return checkpoint(forward, self, *args, use_reentrant=False, **options, **kwargs)

    return run


def _contexts(
    norms: Sequence[nn.Module], inner: Callable[[], tuple[Any, Any]] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the first and the second computation; the second leaves running statistics unchanged."""
    first, second = inner() if inner is not None else (nullcontext(), nullcontext())
    return first, _keeping_buffers(norms, second)


@contextmanager
def _keeping_buffers(modules: Sequence[nn.Module], inner: AbstractContextManager[Any]) -> Iterator[None]:
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        with inner:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def check_classes(argument: str, classes: Any, models: Iterable[nn.Module] | None = None) -> None:
    """Raise unless `classes` are classes of modules and each occurs in a model.

    Raises:
        TypeError, ValueError: the message lists the classes that the models contain.
    """
    if isinstance(classes, str | type):
        raise TypeError(f"{argument} must be a list of classes of modules, such as [nn.Linear], got {classes!r}")
    for each in classes:
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise TypeError(f"{argument} must hold classes of modules, such as [nn.Linear], got {each!r}")
    if models is None:
        return
    found = {type(module) for model in models for module in model.modules()}
    for each in classes:
        if not any(issubclass(kind, each) for kind in found):
            names = ", ".join(sorted(kind.__name__ for kind in found))
            raise ValueError(f"{argument} contains {each.__name__}, but the model does not; it has {names}")
