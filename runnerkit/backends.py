"""Torch's process-wide switches: set for a run, put back after it."""

from typing import Any, cast

import torch


class BackendSwitches:
    """Settings that torch keeps once for a process.

    Args:
        tf32: whether float32 matrix products and convolutions on NVIDIA GPUs may round their inputs to TF32, whose
            mantissa has 10 bits; None leaves torch's setting.
        cudnn_benchmark: whether cuDNN tries its algorithms on the first batch of each shape and keeps the fastest,
            which may differ from run to run; None leaves torch's setting.
    """

    def __init__(self, *, tf32: bool | None = None, cudnn_benchmark: bool | None = None) -> None:
        self.tf32 = tf32
        self.cudnn_benchmark = cudnn_benchmark
        self._before: tuple[str, str, bool] | None = None

    def set(self) -> None:
        """Switch; remember what was set before."""
        cuda, cudnn = torch.backends.cuda, cast(Any, torch.backends.cudnn)  # torch has no types for its `conv`
        self._before = (cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.benchmark)
        if self.tf32 is not None:
            cuda.matmul.fp32_precision = cudnn.conv.fp32_precision = "tf32" if self.tf32 else "ieee"
        if self.cudnn_benchmark is not None:
            cudnn.benchmark = self.cudnn_benchmark

    def restore(self) -> None:
        """Put back what :meth:`set` found; safe to call twice."""
        if self._before is None:
            return
        cuda, cudnn = torch.backends.cuda, cast(Any, torch.backends.cudnn)  # torch has no types for its `conv`
        cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.benchmark = self._before
        self._before = None
