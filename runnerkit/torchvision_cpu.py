"""Import of torchvision, also of a CUDA build next to a CPU-only torch."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

MISSING_OP = "operator torchvision::nms does not exist"


def lacks_operators(error: BaseException | None) -> bool:
    """Return whether torchvision's missing operators are the reason of `error`, or of an error that led to it."""
    while error is not None:
        if MISSING_OP in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def import_torchvision() -> ModuleType:
    """Import torchvision lazily.

    PyPI's torchvision for Linux is built for CUDA. With a CPU-only torch its compiled part cannot be loaded, and the
    import fails because two operators are missing. This function then declares them without an implementation: data
    sets, transforms, utils and classification models work; `torchvision.ops.nms`, detection models and `io.read_image`
    do not.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: torchvision does not match the installed CUDA build of torch; this mismatch is not hidden.

    >>> import_torchvision().datasets.MNIST.__name__
    'MNIST'
    """
    try:
        return _import()
    except RuntimeError as error:
        # Only after a failed import: a torchvision built for the CPU registers the operators itself.
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


@cache  # the operators live as long as the Library object, which the cache keeps
def _declare_missing_ops() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)
    return library
