"""Batches without samples of this process, or with fewer than their loader gave."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runnerkit.steps.gradient_step import GradientStep
from runnerkit.support.torch_internals import has_sparse_gradients
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


def warn_of_dropped_samples(runner: IRunner, step: GradientStep) -> None:
    """Warn once in a stage that a batch has other samples than its loader gave, which other processes do not know."""
    if runner.batch_weight is not None or step.own_size is None:
        return
    is_miscounted = runner.batch_size > step.own_size  # probably on all ranks
    if is_miscounted:
        advice = "Set self.batch_size in handle_batch to the number of samples"
    else:
        advice = "If collate_fn drops samples, set self.batch_weight = self.batch_size in handle_batch"
    if runner.engine.is_main_process or not is_miscounted:
        logging.getLogger(__name__).warning(
            "loader %r: batch %d counts as %d samples, but the loader gave rank %d %d samples, and gradients "
            "weight each process by the samples that its loader gave. %s",
            runner.loader_key, runner.loader_batch_step, runner.batch_size, runner.engine.rank, step.own_size, advice,
        )  # fmt: skip
    step.own_size = None
    runner.current_run.stage.miscounted.add(runner.loader_key)


def begin_idle_step(runner: IRunner, step: GradientStep) -> None:
    """Keep what a step without own samples must not change: buffers, and the rows that sparse gradients touch."""
    modules = [module for model in as_dict(runner.model).values() for module in model.modules()]
    step.kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
    # SparseAdam moves each row that a gradient lists, also where its value is zero.
    embeddings = [parameter for module in modules if has_sparse_gradients(module) for parameter in module.parameters()]
    step.hooks = [each.register_hook(_without_rows) for each in embeddings if each.requires_grad]


def _without_rows(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient) if gradient.is_sparse else gradient


def end_idle_step(step: GradientStep) -> None:
    """Undo what an idle step did to buffers, such as the statistics of batch norm."""
    with torch.no_grad():
        for buffer, before in step.kept:
            buffer.copy_(before)
    for hook in step.hooks:
        hook.remove()
    step.kept, step.hooks = [], []
