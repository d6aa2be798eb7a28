"""Transforms of whole batches on the device: augmentation, normalization, post-processing of model outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.errors import UnknownKeyError
from runnerkit.support.arguments import check_mappings
from runnerkit.support.device_move import same_kind
from runnerkit.types import Batch

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["BatchTransformCallback"]


class BatchTransformCallback(Callback):
    """Apply `transform` to parts of each batch on the device, without gradient before the model.

    A transform that is a module is moved to the device, and is in training mode on training loaders only, so the random
    transforms of ``runnerkit.data`` do not affect evaluation.

    Args:
        transform: called with one argument for each input key, and `transform_kwargs`; or the name of a function of
            torch: "torch.sigmoid", "F.softmax".
        scope: "on_batch_start" transforms the model's inputs, "on_batch_end" its outputs, before the criterion.
        input_key: part or parts to transform: the key in a dict batch; the index in a tuple batch, or the name that
            SupervisedRunner gives to it (`input_key`, `target_key`). None is the whole batch.
        output_key: key or keys of the result or results; None replaces the inputs.
        transform_kwargs: keyword arguments of `transform`.

    >>> BatchTransformCallback(lambda images: images / 255, input_key="features").output_key
    ['features']
    """

    def __init__(
        self,
        transform: Callable[..., Any] | str,
        scope: Literal["on_batch_start", "on_batch_end"] = "on_batch_start",
        input_key: str | int | list[str] | list[int] | None = None,
        output_key: str | int | list[str] | list[int] | None = None,
        transform_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(order=CallbackOrder.Internal - 1)  # before the criterion, in any order of callbacks
        check_mappings(self, transform_kwargs=transform_kwargs)
        transform = _function(transform) if isinstance(transform, str) else transform
        if not callable(transform):
            raise TypeError(f"BatchTransformCallback: transform must be callable, got {transform!r}")
        if scope not in ("on_batch_start", "on_batch_end"):
            raise ValueError(f"BatchTransformCallback: scope must be 'on_batch_start' or 'on_batch_end', got {scope!r}")
        if input_key is None and output_key is not None:
            raise ValueError("BatchTransformCallback: output_key needs input_key: None replaces the whole batch")
        self.transform = transform
        self.scope = scope
        self.input_key = _listed(input_key)
        self.output_key = self.input_key if output_key is None else _listed(output_key)
        self.transform_kwargs = dict(transform_kwargs or {})

    def on_stage_start(self, runner: IRunner) -> None:
        if isinstance(self.transform, nn.Module):
            self.transform.to(runner.engine.device)

    def on_batch_start(self, runner: IRunner) -> None:
        if self.scope == "on_batch_start":
            runner.batch = runner.engine.to_device(self._transformed(runner))  # the engine's memory format for images

    def on_batch_end(self, runner: IRunner) -> None:
        if self.scope == "on_batch_end":
            runner.batch = self._transformed(runner)

    def _transformed(self, runner: IRunner) -> Batch:
        # Checked in each batch: a training loader continues after an evaluation within it.
        if isinstance(self.transform, nn.Module) and self.transform.training != runner.is_train_loader:
            self.transform.train(runner.is_train_loader)
        batch = runner.batch
        if self.input_key is None or self.output_key is None:
            return self.transform(batch, **self.transform_kwargs)
        parts: dict[Any, Any] = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
        names = _places(parts) if isinstance(batch, Mapping) else _names(runner)
        for key in self.input_key:
            if names.get(key, key) not in parts:
                raise UnknownKeyError(
                    f"BatchTransformCallback reads {key!r} of a batch of loader {runner.loader_key!r}, which has "
                    f"{[*parts, *(name for name in names if isinstance(name, str))]}"
                )
        given = [parts[names.get(key, key)] for key in self.input_key]
        results = self.transform(*given, **self.transform_kwargs)
        for key, result in zip(self.output_key, [results] if len(self.output_key) == 1 else results, strict=True):
            parts[names.get(key, key)] = result
        return parts if isinstance(batch, Mapping) else same_kind(batch, [*parts.values()])


def _function(name: str) -> Any:
    """Return a function of torch or torch.nn.functional, "F", by name; the name itself if there is none."""
    module, _, function = name.partition(".")
    return getattr({"torch": torch, "F": F}.get(module), function, name)


def _listed(keys: str | int | list[str] | list[int] | None) -> list[Any] | None:
    return [keys] if isinstance(keys, str | int) else keys


def _places(parts: Iterable[Any]) -> dict[int, Any]:
    """Return {index: key} for a dict, which SupervisedRunner makes of a tuple batch."""
    return {place: key for place, key in enumerate(parts) if place not in parts}


def _names(runner: IRunner) -> dict[str, int]:
    """Return {name: index in a tuple batch} for SupervisedRunner; {} for other runners."""
    keys = [getattr(runner, name, []) for name in ("input_key", "target_key")]
    names = [name for each in keys for name in ([each] if isinstance(each, str) else each)]
    return {name: place for place, name in enumerate(names)}
