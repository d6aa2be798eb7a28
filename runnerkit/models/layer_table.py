"""Model summaries: parameters, output shapes and FLOPs of each layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from tqdm import tqdm

from runnerkit.seeding.generators import keep_rng
from runnerkit.support.device_move import move
from runnerkit.support.text_table import text_table
from runnerkit.support.torch_internals import clear_forward_hooks
from runnerkit.types import Model, as_dict

Models = dict[str, nn.Module]


@dataclass(frozen=True)
class LayerSummary:
    """The summary of one module.

    Attributes:
        name: path in the model, "" for the model itself.
        kind: name of its class.
        num_parameters, num_trainable: including all submodules.
        output_shape: of its last call: (N, C), or a list or dict of shapes; None if it was not called.
        num_flops: of all its calls; None if it was not called.
    """

    name: str
    kind: str
    num_parameters: int
    num_trainable: int
    output_shape: Any = None
    num_flops: int | None = None


@dataclass(frozen=True)
class ModelSummary:
    """The summary of a model; as a string, a table of its modules down to `depth` levels.

    Attributes:
        layers: all modules, in the order of ``named_modules()``.
        num_parameters, num_trainable: of the model; shared parameters count once.
        num_flops: of the forward pass, where a multiply-add counts as two; None if tracing did not complete.
        problem: the reason why tracing did not complete; "" if it did.
        depth: 1 shows the direct submodules of the model, 2 also their submodules.
    """

    layers: list[LayerSummary]
    num_parameters: int
    num_trainable: int
    num_flops: int | None
    problem: str
    depth: int

    def __str__(self) -> str:
        inside = [each for each in self.layers if each.name and each.name.count(".") < self.depth]
        rows = [("layer", "type", "output shape", "parameters", "FLOPs")]
        for each in inside or self.layers:
            flops = "-" if each.num_flops is None else tqdm.format_sizeof(each.num_flops)
            shape = "-" if each.output_shape is None else str(each.output_shape)
            rows.append((each.name, each.kind, shape, f"{each.num_parameters:,}", flops))
        lines = [text_table(rows, align="<<<>>")]
        lines.append(f"{self.num_parameters:,} parameters, {self.num_trainable:,} of them trainable")
        if self.num_flops is not None:
            lines.append(f"{tqdm.format_sizeof(self.num_flops)} FLOPs in the forward pass of one batch")
        elif self.problem:
            lines.append(f"shapes and FLOPs are incomplete, tracing failed: {self.problem}")
        return "\n".join(lines)


def summarize(model: nn.Module, batch: Any = None, *, depth: int = 2) -> ModelSummary:
    """Count a model's parameters; given a batch, also trace the output shape and FLOPs of each layer.

    Nothing is computed: the forward pass runs on a copy with tensors on torch's meta device, which have shapes but not
    values. The model, its mode, device and statistics, and the random generators do not change. Code that depends on
    values cannot be traced; shapes from there on are missing, and `problem` gives the reason.

    FLOPs are those of ``torch.utils.flop_counter``: matrix products, convolutions and attention.

    Args:
        batch: input of the model: a tensor, a tuple or list of tensors, or a dict by argument name.
        depth: levels of modules in the table, >= 1.

    >>> model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> print(summarize(model, torch.zeros(32, 6)))
    layer  type    output shape  parameters  FLOPs
    0      Linear  (32, 16)             112  6.14k
    1      ReLU    (32, 16)               0   0.00
    2      Linear  (32, 3)               51  3.07k
    163 parameters, 163 of them trainable
    9.22k FLOPs in the forward pass of one batch
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"summarize expects a torch.nn.Module, got {type(model).__name__}")
    if batch is None:
        return summary_of(model, None, depth=depth)
    return summary_of(model, lambda copies: _call(copies[""], without_values(batch)), depth=depth)


def summary_of(model: Model, forward: Callable[[Models], object] | None, *, depth: int) -> ModelSummary:
    """Summarize one model, or several by key.

    Args:
        forward: calls copies of the models with tensors on the meta device; None disables tracing.
    """
    if depth < 1:
        raise ValueError(f"depth must be >= 1, got {depth}; 1 shows the direct submodules")
    models = as_dict(model)
    layers = {
        name: LayerSummary(name, type(module).__name__, *_count(module.parameters()))
        for name, module in _named_modules(models)
    }
    num_flops, problem = None, ""
    if forward is not None:
        watches, num_flops, problem = _trace(models, forward)
        for name, watch in watches.items():
            layers[name] = replace(layers[name], output_shape=watch.output_shape, num_flops=watch.num_flops)
    total = _count(chain.from_iterable(each.parameters() for each in models.values()))
    return ModelSummary([*layers.values()], *total, num_flops=num_flops, problem=problem, depth=depth)


def without_values(batch: Any) -> Any:
    """Copy a batch with its tensors on the meta device, where they have shapes but not values."""
    return move(batch, torch.device("meta"))


def _call(model: nn.Module, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _named_modules(models: Models) -> Iterator[tuple[str, nn.Module]]:
    for key, model in models.items():
        for name, module in model.named_modules():
            yield ".".join(filter(None, (key, name))), module


def _count(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Count all parameters and the trainable ones; uninitialized lazy parameters are skipped."""
    known = {id(each): each for each in parameters if not is_lazy(each)}.values()
    return sum(each.numel() for each in known), sum(each.numel() for each in known if each.requires_grad)


def _trace(models: Models, forward: Callable[[Models], object]) -> tuple[dict[str, _Watch], int | None, str]:
    """Return the records of the modules that were called, the total FLOPs, and the reason if these are unknown."""
    from torch.utils.flop_counter import FlopCounterMode

    counter, watches = FlopCounterMode(display=False), {}
    try:
        copies = _without_values(models)
        watches = {name: _Watch(module, counter) for name, module in _named_modules(copies)}
        with keep_rng(), torch.no_grad(), torch.device("meta"), counter:
            forward(copies)
        num_flops, problem = counter.get_total_flops(), ""
    except Exception as error:  # without values, user code can raise anything
        num_flops, problem = None, f"{type(error).__name__}: {error}".splitlines()[0]
    return {name: each for name, each in watches.items() if each.output_shape is not None}, num_flops, problem


def _without_values(models: Models) -> Models:
    """Copy modules to the meta device, which takes no memory, without the user's hooks."""
    memo: dict[int, Any] = {}
    for module in chain.from_iterable(each.modules() for each in models.values()):
        if "forward" in vars(module):
            raise TypeError(f"forward of this {type(module).__name__} was replaced and may run the original model")
        others = (value for value in vars(module).values() if isinstance(value, Tensor))
        for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False), others):
            empty = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    copies = copy.deepcopy(models, memo)
    for _, module in _named_modules(copies):
        clear_forward_hooks(module)
    return copies


class _Watch:
    """A recorder of a module's output shape and FLOPs."""

    def __init__(self, module: nn.Module, counter: Any) -> None:
        self.output_shape: Any = None
        self.num_flops = 0
        self._counter = counter
        self._before: list[int] = []  # one per active call: a module may call itself
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._before.append(self._counter.get_total_flops())

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.num_flops += self._counter.get_total_flops() - self._before.pop()
        self.output_shape = _shape(output)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return {key: _shape(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shape(each) for each in value]
    return type(value).__name__
