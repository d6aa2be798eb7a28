"""Checks of the first step of tensor parallelism, for plans that torch accepts and that train another model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from runnerkit.models.shards import local
from runnerkit.types import parameters_of

_MOST_DIFFERENT = 0.01  # relative; parts of a loss or gradient differ by about as much as they are, rounding by less


class FirstStep:
    """Comparison of the loss, and of gradients of whole parameters, between processes that work on the same samples.

    Every rank must call the methods, which communicate, and read from the device, the first time only.

    Args:
        mesh: these processes, one-dimensional.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._has_loss = False
        self._stepped: set[int] = set()

    def check_loss(self, loss: Tensor) -> None:
        """Raise if the first loss, a () tensor, differs: then the model's outputs are divided."""
        if self._has_loss:
            return
        self._has_loss = True
        if self._differs(loss.detach()):
            raise ValueError(
                "the loss differs between the processes that work on the same samples, because each has a part of the "
                "model's outputs: in plan, give the last layer the style 'colwise_gather'"
            )

    @torch.no_grad()
    def check_gradients(self, optimizer: Optimizer, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Raise if the gradient of a whole parameter differs before the optimizer's first step.

        Then its module works on divided activations, and the processes' weights would drift apart.

        Args:
            parameters: of all models, with their names.
        """
        if id(optimizer) in self._stepped:
            return
        self._stepped.add(id(optimizer))
        mine = set(map(id, parameters_of(optimizer)))
        for name, parameter in parameters:
            grad = parameter.grad
            if id(parameter) in mine and grad is not None and not self._is_divided(grad) and self._differs(local(grad)):
                raise ValueError(
                    f"the gradient of {name!r} differs between the processes that work on the same samples, because "
                    "its module works on divided activations: give it a style in plan, 'sum_gradients', or 'sequence' "
                    "if they are divided along the sequence"
                )

    def _is_divided(self, tensor: Tensor) -> bool:
        """Return whether the processes' parts of `tensor` belong together."""
        dims = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
        return bool(dims and self._mesh.mesh_dim_names and self._mesh.mesh_dim_names[0] in dims)

    def _differs(self, own: Tensor) -> bool:
        own, group = own.double(), self._mesh.get_group()
        total = own.clone()
        dist.all_reduce(total, group=group)
        numbers = torch.stack([(own * self._mesh.size() - total).norm(), total.norm()])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)  # all ranks raise, or none
        differs, norm = numbers.tolist()
        return bool(differs > _MOST_DIFFERENT * norm)
