"""Sparse gradients, such as those of ``nn.Embedding(sparse=True)``, for functions that take only dense ones."""

from __future__ import annotations

from torch import Tensor


def values_of(gradient: Tensor) -> Tensor:
    """Return the values of a sparse gradient, (rows, ...), each row once, with the same norm; a dense one as it is.

    >>> import torch
    >>> values_of(torch.sparse_coo_tensor([[1, 1]], [[2.0], [3.0]], (4, 1)))
    tensor([[5.]])
    """
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def with_dense_gradients(parameters: list[Tensor]) -> list[Tensor]:
    """Return `parameters`, each with a sparse gradient replaced by the rows that its gradient lists.

    Such a row's ``grad`` shares memory with the gradient, so it may be changed in place.
    """
    if not [True for each in parameters if each.grad is not None and each.grad.is_sparse]:
        return parameters
    return [_rows(each) if each.grad is not None and each.grad.is_sparse else each for each in parameters]


def _rows(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    parameter.grad = gradient = parameter.grad.coalesce()
    rows = parameter.detach()[tuple(gradient.indices())]
    rows.grad = gradient.values()
    return rows
