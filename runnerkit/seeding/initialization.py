"""Models whose parameters have a shape but no values yet, and the values that their modules' initialisation gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from runnerkit.seeding.adapters import adapter_reset
from runnerkit.seeding.generators import derive_seed, keep_rng, seed_generators
from runnerkit.support.component_members import ModuleMembers
from runnerkit.support.torch_internals import DispatchMode, is_mutable, storage_id

__all__ = ["initialize_parameters", "parameters_on_meta"]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let models made in the body have parameters on the meta device: with a shape, without values.

    Unlike under ``torch.device("meta")``, buffers have values. At most one parameter at a time is in memory: the one
    that a constructor works on.

    >>> with parameters_on_meta():
    ...     model = nn.BatchNorm1d(3)
    >>> model.weight.device.type, model.running_var.device.type
    ('meta', 'cpu')
    """
    moved = WeakIdKeyDictionary()  # a parameter with two names stays one

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        if parameter not in moved:
            moved[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        meta: nn.Parameter = moved[parameter]
        if getattr(module, name, None) is not None:  # in place of a parameter that the module fills itself
            setattr(meta, _DROPPED, True)
        return meta

    register: Any = register_module_parameter_registration_hook  # typed as if hooks returned nothing
    hook = register(move)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def materialized(model: nn.Module) -> Iterator[None]:
    """Give parameters on the meta device memory on the CPU, for the body to fill; take it back if that raises."""
    slots = _Slots(model)
    metas = {each for each in slots.parameters if each.is_meta}
    slots.put({each: _in_memory(each) for each in metas})
    try:
        yield
    except BaseException:
        slots.put({each: each for each in metas})
        raise


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a parameter is on the meta device."""
    return any(each.is_meta for each in model.parameters())


def dropped_values(model: nn.Module) -> list[str]:
    """Return the names of parameters that :func:`parameters_on_meta` moved when they replaced another of the same name,
    as ``from_pretrained`` does: no method of the module gives such values.
    """
    return [name for name, each in model.named_parameters() if hasattr(each, _DROPPED)]


def mark_left_to_checkpoint(model: nn.Module) -> None:
    """Mark a model on the meta device whose parameters have values in the checkpoints of a run only."""
    setattr(model, _LEFT_TO_CHECKPOINT, True)


def is_left_to_checkpoint(model: nn.Module) -> bool:
    """Return whether :func:`mark_left_to_checkpoint` was called with `model`, and no values were loaded since."""
    return getattr(model, _LEFT_TO_CHECKPOINT, False) and is_on_meta(model)


def initialize_parameters(model: nn.Module, *, seed: int) -> nn.Module:
    """Give the parameters of `model` the values of its modules' own initialisation; return `model`.

    The values of a module depend on `seed` and its name only: with ``FullyShardedDataParallelEngine(init="meta")`` any
    number of processes starts with the same. A module fills its parameters in ``reset_parameters()``, as torch's layers
    do; then the nearest module around it that has a method ``_init_weights(module)``, as models of Hugging Face have,
    is called with it. Adapters of peft (LoRA) start as ``get_peft_model`` lets them. What a constructor does outside of
    these methods is not repeated. Parameters on the meta device move to the CPU.

    Raises:
        ValueError: no method fills a parameter; the message names it.

    >>> model = initialize_parameters(nn.Linear(2, 2), seed=1)
    >>> torch.equal(model.weight, initialize_parameters(nn.Linear(2, 2), seed=1).weight)
    True
    """
    given = dict(model.named_parameters())
    values = dict(given)
    originals = _Slots(model)
    originals.put({each: nn.Parameter(each.detach().to("meta"), each.requires_grad) for each in given.values()})
    try:
        for name, value in initial_values(model, seed=seed):
            if given[name].is_meta:
                values[name] = nn.Parameter(value, given[name].requires_grad)
            else:
                given[name].detach().copy_(value)
    finally:
        originals.put({given[name]: values[name] for name in given})
    return model


def initial_values(model: nn.Module, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value, on the CPU, of each parameter of a model whose parameters are on the meta device.

    The values of one module at a time are in memory. A name may come again, and then its last value counts: a module
    may change what the modules in it did.

    Raises:
        ValueError: no method fills a parameter; the message names it.
    """
    slots = _Slots(model)
    fillers = {module: _fillers(module, path, slots.paths) for module, path in slots.paths.items()}
    _refuse(name for name, holder in slots.holders() if not fillers[holder])

    def filled(
        parameters: set[nn.Parameter], modules: Iterable[nn.Module]
    ) -> tuple[dict[str, Tensor], set[nn.Parameter]]:
        """Let modules fill `parameters`, and return their values; also return what else they wrote to."""
        slots.put({each: _in_memory(each) for each in parameters})
        try:
            with keep_rng(), torch.no_grad(), _Writes() as writes:
                for module in modules:
                    seed_generators(derive_seed(seed, "parameters", slots.paths[module]))
                    for fill in fillers[module]:
                        fill()
            values = {slots.name_of(each): slots.current(each).detach() for each in parameters}
        finally:
            slots.put({each: each for each in parameters})
        _refuse(name for name, value in values.items() if value.numel() and value not in writes)
        return values, {each for each in slots.parameters - parameters if each in writes}

    for module, own in reversed(slots.owned.items()):  # after the modules within it
        values, others = filled(own, [module])
        if others:
            holders = [each for each in module.modules() if others & slots.owned.get(each, set())]
            values, _ = filled(own | others, dict.fromkeys([*reversed(holders), module]))
        yield from values.items()


class _Slots:
    """The places where a model holds its parameters, and the parameters that it held in the beginning.

    Attributes:
        paths: names of the modules, a module before those within it.
        owned: by module, the parameters that it holds, also in lists and dicts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths = {module: path for path, module in model.named_modules()}
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # the first gives a parameter its name
        self.owned: dict[nn.Module, set[nn.Parameter]] = {}
        self._owners: dict[nn.Module, nn.Module] = {}
        by_path = {path: module for module, path in self.paths.items()}
        for module, path in self.paths.items():
            is_part = path and type(module) in _CONTAINERS
            self._owners[module] = self._owners[by_path[path.rpartition(".")[0]]] if is_part else module
            own = self.owned.setdefault(self._owners[module], set())
            for name, parameter in module.named_parameters(recurse=False):
                own.add(parameter)
                self._places.setdefault(parameter, []).append((module, name))
        self.parameters = {*self._places}

    def holders(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each pair of a parameter's name and a module that owns the parameter."""
        for parameter, places in self._places.items():
            yield from ((self.name_of(parameter), self._owners[module]) for module, _ in places)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of an original parameter."""
        module, name = self._places[parameter][0]
        return ".".join(filter(None, (self.paths[module], name)))

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the model holds now in place of the original `parameter`."""
        module, name = self._places[parameter][0]
        return module.get_parameter(name)

    def put(self, parameters: dict[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters; `parameters` maps original ones to their replacements."""
        for old, new in parameters.items():
            for module, name in self._places[old]:
                setattr(module, name, new)


class _Writes(DispatchMode):
    """The memory, real or of the meta device, that the operations in its body wrote to or created."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._storages: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = [*args, result] if is_mutable(func) else [result]
        self._storages.update(storage_id(each) for each in written if isinstance(each, Tensor))
        return result


def _in_memory(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)


def _fillers(module: nn.Module, path: str, paths: dict[nn.Module, str]) -> list[Callable[[], Any]]:
    """Return the methods that give the parameters of `module` their values, in order."""
    around = [each for each, its in reversed(paths.items()) if not its or f"{path}.".startswith(f"{its}.")]
    own = [adapter_reset(module, around), ModuleMembers(module).reset_parameters, ModuleMembers(module).own_reset]
    of_model = [ModuleMembers(each).init_weights for each in around]  # the nearest first
    found = [*filter(callable, own)][:1], [partial(each, module) for each in of_model if callable(each)][:1]
    return [*found[0], *found[1]]


def _refuse(unfilled: Iterable[str]) -> None:
    names = [*dict.fromkeys(unfilled)]
    if names:
        raise ValueError(
            f"no method gives {', '.join(names[:_NUM_LISTED])}{', ...' if names[_NUM_LISTED:] else ''} initial values: "
            "give the module that holds it a method reset_parameters() that fills it, as torch's layers have"
        )


_NUM_LISTED = 8
_CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)  # which fill nothing themselves
_LEFT_TO_CHECKPOINT = "weights_left_behind"
_DROPPED = "dropped_value"
