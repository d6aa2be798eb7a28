"""Where in a model something that is not finite comes from, found by one more forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runnerkit.seeding import keep_rng, set_rng_state
from runnerkit.types import as_dict, like

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class _Found(Exception):
    """Ends the forward pass where it went wrong, before anything else happens."""


def find_origin(runner: IRunner, batch: Any, *, rng: dict[str, Any], of_nan: bool) -> str:
    """Say which module first gave a NaN, or an infinity, when `batch` goes through `handle_batch` once more.

    No rank waits for another. Buffers, random numbers and the runner are as they were afterwards.

    Args:
        batch: what `handle_batch` got.
        rng: state of the generators before it did.
        of_nan: whether a NaN is looked for; on the way the first infinity is noted.
    """
    if runner.engine.sharded_checkpoints:
        return "its module is not looked for, since the model is in parts; try a smaller one on one process"
    models = {key: runner.engine.unwrap(model) for key, model in as_dict(runner.model).items()}
    for name, value in _tensors(batch, "batch"):
        if _is_bad(value):
            return f"{name} is not finite, as the loader gave it"
    for name, value in _state(models):
        if _is_bad(value):
            return f"{name!r} of the model is not finite already"
    search = _Search(of_nan=of_nan)
    buffers = [(each, each.clone()) for model in models.values() for each in model.buffers()]
    kept = {name: getattr(runner, name) for name in ("model", "batch", "batch_metrics")}
    hooks = [
        module.register_forward_hook(partial(search.look, name), with_kwargs=True) for name, module in _modules(models)
    ]
    try:
        with keep_rng(), runner.engine.autocast():
            set_rng_state(rng)
            runner.model, runner.batch, runner.batch_metrics = like(runner.model, models), batch, {}
            runner.handle_batch(batch)
    except _Found as found:
        return str(found)
    except Exception as error:  # of the user's code, which was not made to run twice
        return f"its module is unknown, since the batch could not go through the model once more: {error!r}"
    finally:
        for hook in hooks:
            hook.remove()
        vars(runner).update(kept)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return "what all modules give is fine, so look at the criterion, and at what handle_batch does after the model"


class _Search:
    def __init__(self, *, of_nan: bool) -> None:
        self.of_nan = of_nan
        self.infinity = ""

    def look(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook: raise at what is looked for; modules within a module come before it."""
        test = torch.isnan if self.of_nan else torch.isinf
        place = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if _has([args, kwargs], test):
            words = f"is in the input of {place} and in no output before it: look at the code in front of it"
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
