"""Torch's process-wide settings: changed for a run, restored after it."""

from __future__ import annotations

from contextlib import ExitStack

import torch


class BackendSwitches:
    """Process-wide settings of torch.

    Args:
        tf32: whether float32 matrix products, convolutions and RNNs on NVIDIA GPUs may round their inputs to TF32,
            whose mantissa has 10 bits; None leaves torch's setting.
        cudnn_benchmark: whether cuDNN tries its algorithms on the first batch of each shape and keeps the fastest,
            which may differ from run to run; None leaves torch's setting.
    """

    def __init__(self, *, tf32: bool | None = None, cudnn_benchmark: bool | None = None) -> None:
        self.tf32 = tf32
        self.cudnn_benchmark = cudnn_benchmark
        self._undo = ExitStack()

    def set(self) -> None:
        """Apply the settings; remember the previous ones."""
        self.restore()
        cudnn = torch.backends.cudnn
        if self.tf32 is not None:
            # Not with `fp32_precision`: after it, torch refuses to read the old names, which its compiler reads.
            self._undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            self._undo.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            cudnn.allow_tf32 = self.tf32
        if self.cudnn_benchmark is not None:
            self._undo.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
            cudnn.benchmark = self.cudnn_benchmark

    def restore(self) -> None:
        """Restore what :meth:`set` changed; safe to call twice."""
        self._undo.close()
