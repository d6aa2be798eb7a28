"""A model as a program that runs without its code: torch.export's, ONNX, and ONNX of 8-bit weights."""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runnerkit.storage.atomic_file import AtomicFile
from runnerkit.types import each_tensor


def trace_model(model: nn.Module, batch: Any, **arguments: Any) -> torch.export.ExportedProgram:
    """Trace a model as it evaluates, by ``torch.export``, which torch recommends in place of ``torch.jit.trace``.

    The program takes batches of any length: dimension 0 of all tensors is free, as far as the model lets it be.
    ``torch.export.save(program, "model.pt2")`` writes it, ``torch.export.load("model.pt2").module()`` is a model again.

    Args:
        model: stays as it is; a copy on the CPU is traced.
        batch: what the model is called with: a tuple of arguments, or one.
        arguments: those that it gets by name.
    Raises:
        torch.export's own errors: the model does what cannot be traced, such as a branch on the values of a tensor.

    >>> program = trace_model(nn.Linear(3, 2), torch.zeros(4, 3))
    >>> program.module()(torch.zeros(7, 3)).shape
    torch.Size([7, 2])
    """
    inputs = each_tensor(batch if isinstance(batch, tuple) else (batch,), _example)
    named = each_tensor(arguments, _example)
    by_name = dict(inspect.signature(model.forward).bind(*inputs, **named).arguments)
    shapes = each_tensor(by_name, lambda each: {0: torch.export.Dim.AUTO} if each.ndim else None, others=None)
    return torch.export.export(copy.deepcopy(model).cpu().eval(), inputs, named, dynamic_shapes=shapes)


def save_program(model: nn.Module, batch: Any, file: str | Path, **arguments: Any) -> Path:
    """Write what :func:`trace_model` gives, as a whole; return where."""
    program = trace_model(model, batch, **arguments)
    path = _made(file)
    with AtomicFile(path) as temporary, temporary.open("wb") as stream:  # torch looks at the suffix of a name
        torch.export.save(program, stream)
    return path


def onnx_export(
    model: nn.Module,
    batch: Any,
    file: str | Path = "model.onnx",
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    **arguments: Any,
) -> Path:
    """Write a model as ONNX, for batches of any length, from what :func:`trace_model` gives; return where.

    Args:
        model, batch, arguments: as there.
        input_names, output_names: in the file; None is torch's choice.
        opset_version: of ONNX's operators; None is torch's choice.
    Raises:
        ImportError: the packages of the extra "onnx" are missing.
    """
    needed("onnxscript", by="onnx_export")  # torch's exporter asks for it half-way
    program = trace_model(model, batch, **arguments)
    path = _made(file)
    with AtomicFile(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of what its exporter still uses
        torch.onnx.export(
            program, (), temporary, input_names=input_names, output_names=output_names, opset_version=opset_version,
            dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip
    return path


def quantize_onnx(source: str | Path, file: str | Path) -> Path:
    """Write an ONNX model with weights of 8 bits, whose activations are quantized as they come; return where.

    By ``onnxruntime.quantization.quantize_dynamic``, which needs no data: torch's own, in ``torch.ao``, is deprecated.
    Weights are unsigned: sums of signed ones overflow on CPUs with AVX2 and without VNNI.

    Args:
        source: path of the model in ONNX.
        file: path of the one to write; its folder is made.
    Raises:
        ImportError: the packages of the extra "onnx" are missing.
    """
    onnx, quantization = needed("onnx", by="quantize_onnx"), needed("onnxruntime.quantization", by="quantize_onnx")
    model = onnx.load(source)
    del model.graph.value_info[:]  # shapes of weights, which the quantizer transposes, and then refuses
    path = _made(file)
    with AtomicFile(path) as temporary:
        quantization.quantize_dynamic(model, temporary, weight_type=quantization.QuantType.QUInt8)
    return path


def needed(package: str, *, by: str) -> Any:
    """Import a package of the extra "onnx".

    Raises:
        ImportError: it is missing; with the command.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(f"{by} needs {package.split('.')[0]}: pip install 'runnerkit[onnx]'") from None


def _made(file: str | Path) -> Path:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _example(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return torch.cat([tensor, tensor]) if tensor.ndim and len(tensor) == 1 else tensor  # of one row it would be fixed
