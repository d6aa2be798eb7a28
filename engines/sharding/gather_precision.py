"""Precision in which sharded weights are gathered and computed with: FSDP2's own mixed precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from runnerkit.precision import AMP, FP32, Precision
from runnerkit.support.torch_internals import BatchNorm

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class GatherPrecision:
    """Policies of ``fully_shard``, beside an engine's precision, which acts within the forward pass.

    Args:
        dtype: of parameters and activations in forward and backward; None means the parameters' dtype.
        precision: the engine's.
        engine: its name, for error messages.
    Raises:
        ValueError: the dtype is not supported, or does not go with the precision.
    """

    def __init__(self, dtype: torch.dtype | None, *, precision: Precision, engine: str) -> None:
        if dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"compute_dtype must be torch.bfloat16 or None, got {dtype}; "
                "float16 needs a scaler: precision=AMP(torch.float16)"
            )
        if not isinstance(precision, FP32 | AMP) or (dtype and not isinstance(precision, FP32)):
            raise ValueError(
                f"{engine} accepts either precision=AMP(...) or compute_dtype=torch.bfloat16; "
                f"got {type(precision).__name__} and {dtype}"
            )
        self.dtype = dtype

    def full_precision_units(self, model: nn.Module) -> list[nn.Module]:
        """List batch norms: torch rejects weights of another dtype than that of their running statistics."""
        if self.dtype is None:
            return []
        return [each for each in model.modules() if isinstance(each, BatchNorm) and each.affine]

    def policy(self, *, is_root: bool = False, is_full: bool = False) -> MixedPrecisionPolicy:
        """Return the policy of a unit.

        Args:
            is_root: the unit is the model itself, whose outputs are float32, for the criterion.
            is_full: the unit is one of :meth:`full_precision_units`.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy  # half a second, for this engine only

        if is_full:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.dtype is None:
            return MixedPrecisionPolicy()
        output_dtype = torch.float32 if is_root else None
        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, output_dtype=output_dtype)
