"""A step without samples of this process, which takes part in the collectives of the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from runnerkit.support.torch_internals import has_sparse_gradients


class IdleStep:
    """The parts of the models that an idle step must not change: buffers, and the rows that sparse gradients touch."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = [module for model in models for module in model.modules()]
        self._kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
        # SparseAdam moves each row that a gradient lists, also where its value is zero.
        embeddings = [each for module in modules if has_sparse_gradients(module) for each in module.parameters()]
        self._hooks = [each.register_hook(_without_rows) for each in embeddings if each.requires_grad]

    def end(self) -> None:
        """Undo what the step did to buffers, such as the statistics of batch norm."""
        with torch.no_grad():
            for buffer, before in self._kept:
                buffer.copy_(before)
        for hook in self._hooks:
            hook.remove()


def _without_rows(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient) if gradient.is_sparse else gradient
