"""Importing torchvision, also one that was built for CUDA beside a CPU-only torch."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

MISSING_OP = "operator torchvision::nms does not exist"


def import_torchvision() -> ModuleType:
    """Import torchvision where it is needed, and no earlier.

    PyPI's torchvision for Linux is built for CUDA. Beside a CPU-only torch its compiled part cannot load, and its
    import dies for want of two operators. They are then declared, without a body: data sets, transforms, utils and
    classification models work; `torchvision.ops.nms`, detection models and `io.read_image` do not.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: it does not fit a torch that has CUDA; that mismatch is not ours to hide.

    >>> import_torchvision().datasets.MNIST.__name__
    'MNIST'
    """
    try:
        return _import()
    except RuntimeError as error:
        # Try first, cure second: a torchvision built for the CPU brings the operators, and would clash with ours.
        if torch.version.cuda is not None or MISSING_OP not in str(error):
            raise
    _declare_missing_ops()
    return _import()


def _import() -> ModuleType:
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ImportError("this data set needs torchvision: pip install runnerkit[vision]") from None


@cache  # the operators live as long as the Library object does: the cache keeps it, and there is only one
def _declare_missing_ops() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)
    return library
