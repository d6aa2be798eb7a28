"""Choice of the modules that are gathered and freed as one unit, by class or by size."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from runnerkit.models.regions import check_classes


class ShardPolicy:
    """Rule for the units of a model, whose parameters are gathered before their forward pass and freed together.

    Parameters outside all units belong to the model itself and stay gathered from forward to backward.

    Args:
        modules: classes whose instances are units, such as a transformer's blocks.
        min_parameters: a module is a unit if it has at least this many parameters outside its inner units.
    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(self, modules: Sequence[type[nn.Module]] | None, min_parameters: int | None) -> None:
        check_classes("shard_modules", modules or ())
        self.modules = tuple(modules or ())
        self.min_parameters = min_parameters
        if min_parameters is not None and min_parameters < 1:
            raise ValueError(f"shard_min_parameters must be >= 1, got {min_parameters}; pass None to turn it off")

    def units(self, model: nn.Module) -> list[nn.Module]:
        """List the units of `model` without the model itself, inner units first."""
        units: list[nn.Module] = []
        self._collect(model, units, taken=set(), visited=set())
        return [each for each in units if each is not model]

    def _collect(self, module: nn.Module, units: list[nn.Module], *, taken: set[int], visited: set[int]) -> None:
        visited.add(id(module))
        for child in module.children():
            if id(child) not in visited:
                self._collect(child, units, taken=taken, visited=visited)
        free = {id(each): each.numel() for each in module.parameters() if id(each) not in taken}
        is_large = self.min_parameters is not None and sum(free.values()) >= self.min_parameters
        if free and (isinstance(module, self.modules) or (is_large and _is_called(module))):
            units.append(module)
            taken.update(free)

    def check_init(self, init: str) -> None:
        """Raise unless the engine's `init` is known and has units to work on."""
        if init not in ("whole", "meta"):
            raise ValueError(f"init must be 'whole' or 'meta', got {init!r}")
        if init == "meta" and not self.modules and self.min_parameters is None:
            raise ValueError(
                "init='meta' needs shard_modules=[Block] or shard_min_parameters=..., as without them the whole model "
                "is gathered in each step"
            )

    def check(self, models: Collection[nn.Module], *, needs_units: bool) -> None:
        """Raise if none of the models contains an instance of a class, or, if they are needed, any unit.

        Raises:
            ValueError: the message lists the classes that the models contain.
        """
        check_classes("shard_modules", self.modules, models)
        if needs_units and models and not any(map(self.units, models)):
            raise ValueError(
                "init='meta' would gather the whole model in each step, as no module within it is a unit: pass other "
                "shard_modules, or a smaller shard_min_parameters"
            )


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def mesh_sizes(
    num_processes: int, replicas: int, tensor_parallel: int, *, bounds: tuple[int, int] | None = None, plan: Any = None
) -> dict[str, int]:
    """Return the sizes of the device mesh by dimension; -1 is what is left for the shards.

    Args:
        bounds: least and largest number of processes, if it was given.
        plan: of tensor parallelism.
    Raises:
        TypeError: `plan` is not a mapping.
        ValueError: a size does not divide the number of processes, or that is not known yet; `plan` has none to act on.
    """
    if plan is not None and not isinstance(plan, Mapping):
        raise TypeError(
            "plan must map patterns of module names to styles, such as {'*.up': 'colwise', '*.down': 'rowwise'}, got "
            f"{plan!r}; leave it out to take the model's own"
        )
    if plan and tensor_parallel == 1:
        raise ValueError("plan acts on the processes of tensor_parallel=2 or more; pass both, or neither")
    if bounds is not None and bounds[0] < bounds[1] and replicas * tensor_parallel > 1:
        raise ValueError(
            f"replicas and tensor_parallel divide one number of processes, got num_processes={bounds}; "
            "pass one number, or omit them"
        )
    for name, size in (("replicas", replicas), ("tensor_parallel", tensor_parallel)):
        if size < 1 or num_processes % size:
            raise ValueError(
                f"{name} must divide the number of processes, got {size} for {num_processes}; "
                "pass 1 to shard over all of them"
            )
    if num_processes % (replicas * tensor_parallel):
        raise ValueError(
            f"replicas={replicas} times tensor_parallel={tensor_parallel} must divide the number of processes, "
            f"{num_processes}"
        )
    sizes = {"replicas": replicas, "shards": -1, "tensor": tensor_parallel}
    return {name: size for name, size in sizes.items() if size != 1}


def check_parameters(models: dict[str, nn.Module], units: dict[str, list[nn.Module]]) -> None:
    """Raise if a parameter cannot be sharded: a scalar, or shared across units or models.

    Raises:
        ValueError: the message names the parameter and the remedy.
    """
    owners: dict[int, tuple[str, int, str]] = {}
    for key, model in models.items():
        unit_of = _unit_of_modules(model, units[key])
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full = ".".join(part for part in (key, path, name) if part)
                if parameter.ndim == 0:
                    raise ValueError(f"parameter {full} is a scalar, which cannot be sharded: give it the shape (1,)")
                owner, unit, other = owners.setdefault(id(parameter), (key, unit_of[id(module)], full))
                if owner != key:
                    raise ValueError(f"parameters {other} and {full} are shared by two models: merge them into one")
                if unit != unit_of[id(module)]:
                    raise ValueError(
                        f"parameters {other} and {full} are shared, but would be gathered at different times: choose "
                        "shard_modules or shard_min_parameters so that both are in the same unit, or in none"
                    )


def check_places(models: dict[str, nn.Module], *, on_meta: Collection[str]) -> None:
    """Raise if a parameter has a value though it should not, or none though it should.

    Args:
        on_meta: keys of the models whose parameters should be on the meta device.
    Raises:
        ValueError: the message names the parameter and the remedy.
    """
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            full = ".".join(part for part in (key, name) if part)
            if key in on_meta and not parameter.is_meta:
                raise ValueError(
                    f"parameter {full} has a value, which init='meta' would drop: make the model in get_model, or in "
                    "`with utils.parameters_on_meta():`; a CheckpointCallback's resume_model= loads its weights"
                )
            if key not in on_meta and parameter.is_meta:
                raise ValueError(
                    f"parameter {full} is on the meta device, without a value: "
                    + ("models that are not trained are kept whole, so make this one outside of get_model"
                       if on_meta else "FullyShardedDataParallelEngine(init='meta') trains such models")
                )  # fmt: skip
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {'.'.join(part for part in (key, name) if part)} is on the meta device, without a value: "
                    "make the model in get_model, or in `with utils.parameters_on_meta():`, which leaves buffers alone "
                    "that are not computed from parameters"
                )


def _unit_of_modules(model: nn.Module, units: list[nn.Module]) -> dict[int, int]:
    """Map each module's id to the id of the unit that holds its parameters."""
    unit_of = {id(each): id(model) for each in model.modules()}
    for unit in reversed(units):  # outer ones first
        unit_of.update({id(each): id(unit) for each in unit.modules()})
    return unit_of
