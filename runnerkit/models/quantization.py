"""Quantization of a trained model's weights for inference."""

from __future__ import annotations

import copy

from torch import nn

from runnerkit.models.parameters import get_nn_from_ddp_module


def quantize_model(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU, in evaluation mode, whose linear layers have weights of 8 bits.

    Inputs of these layers are quantized as they come (torchao's ``Int8DynamicActivationInt8WeightConfig``). A file for
    other runtimes is written by :func:`quantize_onnx`.

    Args:
        model: a trained module, which is not changed.
    Raises:
        ImportError: the package torchao is missing.
    """
    try:
        from torchao.quantization import (  # type: ignore[import-untyped]  # untyped
            Int8DynamicActivationInt8WeightConfig,
            quantize_,
        )
    except ImportError:
        raise ImportError("quantize_model needs torchao: pip install 'runnerkit[float8]'") from None
    own = copy.deepcopy(get_nn_from_ddp_module(model)).cpu().eval()
    quantize_(own, Int8DynamicActivationInt8WeightConfig())
    return own
