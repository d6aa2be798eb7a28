"""Catalyst's view of the machine: its GPUs, and which optional packages a program may use."""

from __future__ import annotations

from importlib.util import find_spec

import torch

__all__ = ["IS_CUDA_AVAILABLE", "NUM_CUDA_DEVICES", "SETTINGS"]

IS_CUDA_AVAILABLE = torch.cuda.is_available()
NUM_CUDA_DEVICES = torch.cuda.device_count()
_PACKAGES = {"cv": "torchvision", "ml": "sklearn", "albu": "albumentations"}
_IN_TORCH = {"amp", "pruning", "quantization"}
_SERVICES = {"comet", "mlflow", "neptune", "wandb"}


class _Settings:
    """``<package>_required`` is whether the package is installed; False for services, whose loggers here take a logdir.

    >>> SETTINGS.amp_required, SETTINGS.no_such_package_required
    (True, False)
    """

    def __getattr__(self, name: str) -> bool:
        extra, suffix, rest = name.rpartition("_required")
        if not suffix or rest:
            raise AttributeError(f"{name}: settings have names such as ml_required")
        is_installed = extra in _IN_TORCH or find_spec(_PACKAGES.get(extra, extra)) is not None
        return is_installed and extra not in _SERVICES


SETTINGS = _Settings()
