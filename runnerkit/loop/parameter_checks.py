"""Checks that all that trains belongs to the model or the criterion: the rest is neither saved nor averaged."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from runnerkit.callback import ICheckpointCallback, innermost
from runnerkit.loop.component_checks import check_components
from runnerkit.support.component_members import ModuleMembers
from runnerkit.types import as_dict, parameters_of

if TYPE_CHECKING:
    from runnerkit.callback import IRunner
    from runnerkit.engine import IEngine

logger = logging.getLogger(__name__)

_MOST_SHAPES = 5
_WHERE_TO = (
    "put them into the model, or into a module of their own whose forward uses them and return both from get_model, "
    'such as {"net": model, "weights": LossWeights()} (docs/engines.md, "What an engine trains")'
)


def check_optimizer(optimizer: Any, model: Any, criterion: Any) -> None:
    """Raise if an optimizer trains parameters that belong neither to model nor criterion, or one of them is not one.

    Raises:
        TypeError: as in :func:`check_components`.
        ValueError: with the number of these parameters and their shapes.
    """
    check_components(model=model, criterion=criterion, optimizer=optimizer)
    _check_known(as_dict(optimizer), {*_parameters_in(model, criterion)})


def check_added(optimizer: Any, model: Any, criterion: Any, *, known: set[Tensor]) -> None:
    """Raise if an optimizer got parameters since the stage began that belong neither to model nor criterion.

    Args:
        known: the optimizers' parameters when the stage began.
    Raises:
        ValueError: as in :func:`check_optimizer`.
    """
    optimizers = as_dict(optimizer)
    if not known.issuperset(parameters_of(*optimizers.values())):
        _check_known(optimizers, known | {*_parameters_in(model, criterion)})


def _parameters_in(*components: Any) -> Iterator[Tensor]:
    for component in components:
        for each in as_dict(component).values():
            if isinstance(each, nn.Module):
                yield from each.parameters()


def _check_known(optimizers: Mapping[str, Any], known: Collection[Tensor]) -> None:
    for key, optimizer in optimizers.items():
        name = f"optimizer {key!r}" if key else "the optimizer"
        parameters = [*parameters_of(optimizer)]
        if parameters and not any(each in known for each in parameters):
            raise ValueError(
                f"{name} holds {len(parameters)} parameters, none of which belongs to the model; create it from "
                "model.parameters() of the model that is trained"
            )
        unknown = [each for each in parameters if each.requires_grad and each not in known]
        if unknown:
            raise ValueError(
                f"{name} trains parameters that belong to no model, and would be neither saved nor averaged over "
                f"processes: {len(unknown)}, of shape {_shapes(unknown)}; {_WHERE_TO}"
            )


def check_criterion(criterion: Any, engine: IEngine, *, loss_reduction: str, trains: bool) -> None:
    """Raise if a criterion has trainable parameters and several processes would train them independently.

    Warn if it sums over the batch, and `loss_reduction` does not say so in a stage that trains.

    Raises:
        ValueError: with what to do.
    """
    for each in as_dict(criterion).values():
        is_sum = ModuleMembers(each).reduction == "sum"
        if is_sum and trains and loss_reduction != "sum" and engine.is_main_process:
            logger.warning(
                "%s(reduction='sum') sums over the batch, but gradients are averaged over processes and accumulated "
                "batches: pass loss_reduction='sum' to train(), which adds them up", type(each).__name__,
            )  # fmt: skip
        trained = [each for each in _parameters_in(each) if each.requires_grad]
        if engine.is_ddp and trained:
            raise ValueError(
                f"{type(each).__name__} has trainable parameters, whose gradients are not averaged over processes: "
                f"{len(trained)}, of shape {_shapes(trained)}; return it from get_model beside the model, such as "
                '{"net": model, "criterion": criterion}, and call self.model["criterion"](...) in handle_batch; '
                "if they are constants, call criterion.requires_grad_(False)"
            )


def warn_of_lost_weights(runner: IRunner) -> None:
    """Warn that a run ends without its weights, if no process holds them and no callback saves them."""
    engine, is_last = runner.engine, runner.stage_key == [*runner.stages][-1]
    saves = any(isinstance(innermost(each), ICheckpointCallback) for each in runner.callbacks.values())
    if engine.never_whole and is_last and runner.optimizer is not None and not saves and engine.is_main_process:
        logger.warning(
            "with init='meta' the weights that this run trains are lost at its end, since it saves no checkpoint: "
            "pass a logdir, or a CheckpointCallback"
        )


def _shapes(parameters: list[Tensor]) -> str:
    shapes = ["unknown" if is_lazy(each) else str(tuple(each.shape)) for each in parameters[:_MOST_SHAPES]]
    return ", ".join([*shapes, "..."] if len(parameters) > _MOST_SHAPES else shapes)
