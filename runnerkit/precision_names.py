"""Precisions by name, as the arguments of `train` and of engines, the command line and configs have them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from runnerkit.errors import did_you_mean
from runnerkit.precision import FP32, PRECISIONS, Precision

PrecisionName: TypeAlias = Literal["fp32", "amp", "fp16", "bf16", "fp8"]
PRECISION_NAMES = (*PRECISIONS, "fp8")


def as_precision(given: Precision | PrecisionName | None, *, owner: object) -> Precision:
    """Return a precision that is given itself or by its name; None is fp32.

    Args:
        owner: an object of the class that errors name.
    Raises:
        ValueError, TypeError: an unknown name, or something else; the message lists the names.

    >>> as_precision("bf16", owner=None).dtype
    torch.bfloat16
    """
    if given is None:
        return FP32()
    if isinstance(given, str):
        return precision_by_name(given)
    if isinstance(given, type) or not hasattr(given, "autocast"):
        raise TypeError(
            f"{type(owner).__name__}: precision must be one of {', '.join(PRECISION_NAMES)}, or a precision such as "
            f"dl.AMP(), got {given!r}{suggested_precision(given)}"
        )
    return given


def precision_by_name(name: str) -> Precision:
    """Return the precision of a name in `PRECISION_NAMES`.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in PRECISION_NAMES:
        found = f"unknown precision {name!r}; expected one of {', '.join(PRECISION_NAMES)}"
        raise ValueError(found + suggested_precision(name))
    if name == "fp8":
        from runnerkit.engines.adapters.float8 import Float8  # an exception to the layers: few runs need torchao

        return Float8()
    return PRECISIONS[name]()


def suggested_precision(given: object) -> str:
    """Return the end of a message about an unknown precision, with the one that other libraries call so, if any.

    >>> import torch
    >>> suggested_precision("bf16-mixed"), suggested_precision(torch.float16), suggested_precision("double")
    ("; did you mean 'bf16'?", "; did you mean 'fp16'?", '')
    """
    same = precision_called(given)
    return did_you_mean(given, PRECISION_NAMES) if same is None else f"; did you mean {same!r}?"


def precision_called(given: object) -> str | None:
    """Return our name of a precision that other libraries call so; None if there is none."""
    name = str(given).lower().removeprefix("torch.").removesuffix("-mixed").removesuffix("-true")
    name = name.replace("bfloat", "bf").replace("float", "fp")
    same = {"half": "fp16", "16": "fp16", "32": "fp32", "8": "fp8"}.get(name, name)
    return same if same in PRECISION_NAMES else None
