"""What a model is made of: parameters, output shapes and FLOPs, layer by layer."""

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

from runnerkit.engine import move
from runnerkit.seeding import keep_rng
from runnerkit.text_table import text_table
from runnerkit.types import Model, as_dict

Models = dict[str, nn.Module]


@dataclass(frozen=True)
class LayerSummary:
    """One module of a model.

    Attributes:
        name: its path in the model, "" for the model itself.
        kind: its class.
        num_parameters, num_trainable: of it and of all modules inside.
        output_shape: of what it returned last: (N, C), or several in a list or dict; None if it was not called.
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
    """A model's modules; as a string, a table of those at most `depth` levels inside.

    Attributes:
        layers: all modules, in the order of ``named_modules()``.
        num_parameters, num_trainable: of the model; what modules share counts once.
        num_flops: of the forward pass: a multiplication and an addition are two; None if it was not traced to its end.
        problem: why it was not; "" if it was.
        depth: 1 shows what the model consists of, 2 also what these consist of.
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
            lines.append(f"shapes and FLOPs as far as they could be traced: {self.problem}")
        return "\n".join(lines)


def summarize(model: nn.Module, batch: Any = None, *, depth: int = 2) -> ModelSummary:
    """Count a model's parameters; given a batch, trace what each layer makes of it and what that costs.

    Nothing is computed: the forward pass is that of a copy whose tensors, on torch's meta device, have shapes and no
    values. The model, its mode, device and statistics, and all random numbers, stay as they were. What cannot be
    traced so (code that looks at values, say) has no shape; `problem` tells why.

    FLOPs are those of ``torch.utils.flop_counter``: matrix products, convolutions and attention.

    Args:
        batch: what the model is called with: a tensor, a tuple or list of several, or a dict by argument name.
        depth: levels of modules that the table shows, >= 1.

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
        raise TypeError(f"summarize wants a torch.nn.Module, got {type(model).__name__}")
    if batch is None:
        return summary_of(model, None, depth=depth)
    return summary_of(model, lambda copies: _call(copies[""], without_values(batch)), depth=depth)


def summary_of(model: Model, forward: Callable[[Models], object] | None, *, depth: int) -> ModelSummary:
    """Summarize one model, or several by key.

    Args:
        forward: calls copies of the models with tensors on the meta device; None traces nothing.
    """
    if depth < 1:
        raise ValueError(f"depth must be >= 1, got {depth}; 1 shows what the model consists of")
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
    """Copy a batch; its tensors have shapes and no values."""
    return move(batch, torch.device("meta"), path="batch")


def _call(model: nn.Module, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _named_modules(models: Models) -> Iterator[tuple[str, nn.Module]]:
    for key, model in models.items():
        for name, module in model.named_modules():
            yield ".".join(filter(None, (key, name))), module


def _count(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """All, and trainable ones; a lazy module's have no number yet."""
    known = {id(each): each for each in parameters if not is_lazy(each)}.values()
    return sum(each.numel() for each in known), sum(each.numel() for each in known if each.requires_grad)


def _trace(models: Models, forward: Callable[[Models], object]) -> tuple[dict[str, _Watch], int | None, str]:
    """Return what was seen of the modules that were called, all FLOPs, and why these are unknown."""
    from torch.utils.flop_counter import FlopCounterMode

    counter, watches = FlopCounterMode(display=False), {}
    try:
        copies = _without_values(models)
        watches = {name: _Watch(module, counter) for name, module in _named_modules(copies)}
        with keep_rng(), torch.no_grad(), torch.device("meta"), counter:
            forward(copies)
        num_flops, problem = counter.get_total_flops(), ""
    except Exception as error:  # whatever code does that finds no values
        num_flops, problem = None, f"{type(error).__name__}: {error}".splitlines()[0]
    return {name: each for name, each in watches.items() if each.output_shape is not None}, num_flops, problem


def _without_values(models: Models) -> Models:
    """Copy modules, in no memory: what they hold has shapes and no values. The user's hooks are left out."""
    memo: dict[int, Any] = {}
    for module in chain.from_iterable(each.modules() for each in models.values()):
        if "forward" in vars(module):
            raise TypeError(f"forward of {type(module).__name__} is not its class's: it may run the model itself")
        others = (value for value in vars(module).values() if isinstance(value, Tensor))
        for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False), others):
            empty = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    copies = copy.deepcopy(models, memo)
    for _, module in _named_modules(copies):
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copies


class _Watch:
    """Sees what a module returns, and counts the FLOPs of its calls."""

    def __init__(self, module: nn.Module, counter: Any) -> None:
        self.output_shape: Any = None
        self.num_flops = 0
        self._counter = counter
        self._before: list[int] = []  # of calls under way: a module may call itself
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
