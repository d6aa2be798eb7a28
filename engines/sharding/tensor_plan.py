"""Tensor parallelism: the modules whose weights are divided among processes that work on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from runnerkit.checkpoints.sharded import by_rows
from runnerkit.metrics.reduction import Processes
from runnerkit.seeding.generators import CPUState, derive_seed
from runnerkit.support.component_members import ModuleMembers
from runnerkit.support.torch_internals import replace_parameters

Plan = Mapping[str, str | ParallelStyle]

_OF_ADAPTERS = (
    "give those of a divided layer styles as in {'*.up.base_layer': 'colwise', '*.up.lora_B.*': 'colwise', "
    "'*.down.base_layer': 'rowwise', '*.down.lora_A.*': 'rowwise'}"
)

# The attribute with the number of rows or columns that a style divides.
_SIDES: dict[tuple[type[nn.Module], type[ParallelStyle]], str] = {
    (nn.Linear, ColwiseParallel): "out_features",
    (nn.Linear, RowwiseParallel): "in_features",
    (nn.Embedding, ColwiseParallel): "embedding_dim",
    (nn.Embedding, RowwiseParallel): "num_embeddings",
}


class RandomApart(ParallelStyle):
    """Style of a module whose random numbers differ between the processes of a group, as do its activations.

    All others draw the same, since they work on the same values.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, outside = device_mesh.get_local_rank(), list[tuple[CPUState, Any]]()

        def enter(module: nn.Module, args: Any) -> None:
            if not module.training:
                return
            seed = int(torch.randint(2**62, ()))  # the same in the group; drawn again where activations are recomputed
            cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
            outside.append((CPUState(), cuda))
            torch.manual_seed(derive_seed(seed, "tensor rank", rank))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not outside:
                return
            state, cuda = outside.pop()
            state.restore(["torch"])
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class SumGradients(ParallelStyle):
    """Style of a module that has whole parameters and works on divided activations, such as a norm of each head: the
    gradients of its parameters are summed over the group.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, each in [*module.named_parameters()]:
            on_all = DTensor.from_local(each.detach(), device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(on_all, each.requires_grad))
        wholes = list[dict[str, Any]]()

        def enter(module: nn.Module, args: Any) -> None:
            parts = {
                name: cast(DTensor, each).to_local(grad_placements=[Partial()])
                for name, each in module.named_parameters()
            }
            wholes.append(replace_parameters(module, parts))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if wholes:
                replace_parameters(module, wholes.pop())

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


# Those with further names are known by them to models of Hugging Face.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "sum_gradients": SumGradients,
    "replicated_with_grad_allreduce": SumGradients,
    "random_apart": RandomApart,
}


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Plan | None) -> set[str]:
    """Divide the weights of modules among the processes of `mesh`, one-dimensional.

    Args:
        plan: patterns of module names to styles; None takes the model's own.
    Returns:
        The patterns that match no module.
    Raises:
        ValueError: the model needs a plan, or a style is unknown or does not fit a module.
    """
    if plan is None:
        plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ValueError(
            f"tensor_parallel={mesh.size()} needs plan={{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}}, as "
            f"{type(model).__name__} does not bring one"
        )
    modules, unmatched, matched = dict(model.named_modules()), set[str](), dict[str, str]()
    styles = dict[str, ParallelStyle]()
    shared = _tied_parameters(model)
    for pattern, style in plan.items():
        found = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        if not found:
            unmatched.add(pattern)
        for name, module in found.items():
            if name in matched:
                raise ValueError(f"plan: {matched[name]!r} and {pattern!r} both give {name!r} a style")
            each, matched[name] = _style(pattern, style), pattern
            _check_layer(module, each, name=name, size=mesh.size())
            if isinstance(modules[name.rpartition(".")[0]], nn.MultiheadAttention):
                raise ValueError(
                    f"plan: nn.MultiheadAttention computes with the weights of {name!r} itself and cannot be divided; "
                    "use separate layers for query, key, value and output"
                )
            styles[name] = each
    _check_adapters(modules, styles)
    for name, each in styles.items():
        try:
            parallelize_module(modules[name], mesh, each)
        except NotImplementedError:
            kind = type(modules[name]).__name__
            raise ValueError(f"plan: {type(each).__name__} cannot divide {name!r}, a {kind}") from None
    for places in shared:
        _retie_parameters({name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in places})
    return unmatched


def _tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _retie_parameters(places: dict[str, tuple[nn.Module, str]]) -> None:
    """Let modules share a parameter that they shared before it was divided.

    Args:
        places: modules and their attributes, by the parameter's names.
    Raises:
        ValueError: the modules divide it in different ways.
    """
    parameters = [getattr(module, name) for module, name in places.values()]
    kinds = {each.placements if isinstance(each, DTensor) else None for each in parameters}
    if len(kinds) > 1:
        raise ValueError(
            f"plan: {' and '.join(places)} are one parameter, which must be divided in one way: give all their modules "
            "styles that divide it alike, such as 'embedding' and 'colwise_gather', or none of them"
        )
    for module, name in places.values():
        module.register_parameter(name, parameters[0])


def check_patterns(unmatched: Collection[set[str]], models: Iterable[nn.Module]) -> None:
    """Raise if a pattern matches a module of none of the models.

    Args:
        unmatched: the results of :func:`parallelize`.
    """
    if names := sorted(set.intersection(*unmatched)) if unmatched else []:
        have = [name for model in models for name, _ in model.named_modules() if name]
        raise ValueError(f"plan: no module is named {names[0]!r}; the model has {', '.join(have[:8])}, ...")


def _style(pattern: str, style: str | ParallelStyle) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise ValueError(
            f"plan: {pattern!r} has the unknown style {style!r}; use a ParallelStyle of "
            f"torch.distributed.tensor.parallel, or one of {', '.join(STYLES)}"
        )
    return STYLES[style]()


def _check_layer(module: nn.Module, style: ParallelStyle, *, name: str, size: int) -> None:
    """Raise if a style for one layer is given to a module of several, or a layer's outputs or inputs, divided, are not
    as many in each process: torch takes them to be.
    """
    if isinstance(style, ColwiseParallel | RowwiseParallel | SequenceParallel) and any(module.children()):
        if "lora_A" in ModuleMembers(module).adapter_layer_names:
            raise ValueError(f"plan: {name!r} has adapters, and so several layers: {_OF_ADAPTERS}")
        raise ValueError(
            f"plan: {name!r} is a {type(module).__name__} with modules of its own, but {type(style).__name__} is the "
            "style of one layer; note that * also matches dots"
        )
    sides = [its for (layer, kind), its in _SIDES.items() if isinstance(module, layer) and isinstance(style, kind)]
    if not sides:
        return
    side, width = sides[0], getattr(module, sides[0])
    if width < size or (width % size and _has_parts(style)):
        raise ValueError(f"plan: {name!r} has {side}={width}, which tensor_parallel={size} does not divide")


def _has_parts(style: ParallelStyle | None) -> bool:
    """Return whether each process has a part of the outputs of a colwise layer, or of the inputs of a rowwise one."""
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return False
    layouts: Any = style.output_layouts if isinstance(style, ColwiseParallel) else style.input_layouts
    return not layouts[0].is_replicate()


def _check_adapters(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]) -> None:
    """Raise if a layer works on parts, but not the matrix of its LoRA adapter that has the same outputs or inputs."""
    for name, module in modules.items():
        if "lora_A" not in ModuleMembers(module).adapter_layer_names:
            continue
        for kind, matrix in ((ColwiseParallel, "lora_B"), (RowwiseParallel, "lora_A")):
            parts = (f"{name}.base_layer", f"{name}.{matrix}.")
            given = [styles.get(each) for each in modules if each == parts[0] or each.startswith(parts[1])]
            if len({isinstance(each, kind) and _has_parts(each) for each in given}) > 1:
                raise ValueError(
                    f"plan: {parts[0]} and the adapters {name}.{matrix} must be divided alike: {_OF_ADAPTERS}"
                )


@contextmanager
def gradients_on(mesh: DeviceMesh, parameters: list[Tensor]) -> Iterator[None]:
    """Let all gradients have one mesh in the body, as torch's norms need; they stay in the same memory."""
    kept = [
        (each, each.grad) for each in parameters if isinstance(each.grad, DTensor) and each.grad.device_mesh != mesh
    ]
    for parameter, grad in kept:
        parameter.grad = DTensor.from_local(
            grad.to_local(), mesh, by_rows(mesh), run_check=False, shape=grad.shape, stride=grad.stride()
        )
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


class DataRanks(Processes):
    """The processes that have the same part of each divided weight: they divide the samples among themselves.

    Args:
        everyone: all processes.
        size: number of processes that work on the same samples, whose ranks follow one another.
        group: these processes.
    """

    def __init__(self, everyone: Any, *, size: int, group: Any) -> None:
        self.device, self.num_processes = everyone.device, everyone.num_processes // size
        self._everyone, self._size, self._group = everyone, size, group

    @property
    def rank(self) -> int:
        return self._everyone.rank // self._size  # type: ignore[no-any-return]

    def reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        reduced = tensor.clone()
        dist.all_reduce(reduced, group=self._group)
        return reduced

    def start_sum(self, value: Tensor) -> Callable[[], Tensor]:
        total = self._everyone.start_sum(value)
        return lambda: total() / self._size  # all processes that work on the same samples add the same

    def gather_object(self, value: Any) -> list[Any]:
        return self._everyone.gather_object(value)[self._everyone.rank % self._size :: self._size]  # type: ignore[no-any-return]
