"""Location of the module that first produces a non-finite value, by a second forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runnerkit.loop.attributes import LoaderAttributes
from runnerkit.seeding.generators import keep_rng, set_rng_state
from runnerkit.types import as_dict, like

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class _Found(Exception):
    """Raised to end the forward pass at the first non-finite value."""


def find_origin(runner: IRunner, batch: Any, *, rng: dict[str, Any], of_nan: bool) -> str:
    """Run `batch` through `handle_batch` again and describe which module first outputs a NaN or an infinity.

    Ranks do not communicate. Buffers, random number generators and the runner are restored.

    Args:
        batch: the batch passed to `handle_batch`.
        rng: state of the generators before that call.
        of_nan: search for a NaN, and also report the first infinity before it; otherwise search for an infinity.
    """
    if runner.engine.sharded_checkpoints:
        return "its module cannot be located in a sharded model; try a smaller model on one process"
    models = {key: runner.engine.unwrap(model) for key, model in as_dict(runner.model).items()}
    for name, value in _tensors(batch, "batch"):
        if _is_bad(value):
            return f"{name} is already not finite in the batch from the loader"
    for name, value in _state(models):
        if _is_bad(value):
            return f"parameter {name!r} of the model is already not finite"
    search = _Search(of_nan=of_nan)
    buffers = [(each, each.clone()) for model in models.values() for each in model.buffers()]
    model, kept = runner.model, LoaderAttributes.of(runner)
    hooks = [
        module.register_forward_hook(partial(search.look, name), with_kwargs=True) for name, module in _modules(models)
    ]
    try:
        with keep_rng(), runner.engine.autocast():
            set_rng_state(rng)
            runner.model, runner.batch, runner.batch_metrics = like(model, models), batch, {}
            runner.handle_batch(batch)
    except _Found as found:
        return str(found)
    except Exception as error:  # raised by user code that cannot run twice
        return f"its module is unknown, because the batch could not run through the model again: {error!r}"
    finally:
        for hook in hooks:
            hook.remove()
        runner.model = model
        kept.restore(runner)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return "all module outputs are finite, so check the criterion and the code after the model in handle_batch"


class _Search:
    def __init__(self, *, of_nan: bool) -> None:
        self.of_nan = of_nan
        self.infinity = ""

    def look(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Raise at the first bad value; a forward hook, called for submodules before their parent."""
        test = torch.isnan if self.of_nan else torch.isinf
        place = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if _has([args, kwargs], test):
            words = f"is in the input of {place} but in no earlier output: check the code that computes this input"
        elif _has(output, test):
            words = f"is in the output of {place}"
        else:
            if self.of_nan and not self.infinity and _has(output, torch.isinf):
                self.infinity = f", after an infinity in that of {place}"
            return
        raise _Found(f"the first {'NaN' if self.of_nan else 'infinity'} {words}{self.infinity}")


def _modules(models: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for key, model in models.items():
        for name, module in model.named_modules():
            yield ".".join(each for each in (key, name) if each), module


def _state(models: dict[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for model in models.values():
        yield from model.named_parameters()


def _has(value: Any, test: Any) -> bool:
    return any(bool(test(each).any()) for _, each in _tensors(value, "") if each.is_floating_point())


def _is_bad(value: Tensor) -> bool:
    return value.is_floating_point() and not bool(value.isfinite().all())


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}[{index}]")
