"""Export of models to programs that run without their code: torch.export, ONNX, and ONNX with 8-bit weights."""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runnerkit.storage.atomic_file import AtomicFile
from runnerkit.storage.claims import readable
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.types import each_tensor


def trace_model(model: nn.Module, batch: Any, **arguments: Any) -> torch.export.ExportedProgram:
    """Trace a model in evaluation mode with ``torch.export``, which torch recommends instead of ``torch.jit.trace``.

    The program accepts batches of any length: dimension 0 of all tensors is dynamic, unless the model fixes its size.
    ``torch.export.save(program, "model.pt2")`` writes it, and ``torch.export.load("model.pt2").module()`` loads it.

    Args:
        model: not modified; a copy on the CPU is traced.
        batch: input of the model: one argument or a tuple of arguments.
        arguments: keyword arguments of the model.
    Raises:
        Errors of torch.export: the model cannot be traced, for example because it branches on the values of a tensor.

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
    """Write the program of :func:`trace_model` atomically, also to a URL; return its path."""
    program = trace_model(model, batch, **arguments)
    with _new(file) as temporary, temporary.open("wb") as stream:  # torch checks the suffix of a name
        torch.export.save(program, stream)
    return name_of(file)


def onnx_export(
    model: nn.Module,
    batch: Any,
    file: str | Path = "model.onnx",
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    verbose: bool = False,
    **arguments: Any,
) -> Path:
    """Export a model to ONNX, for batches of any length; return the path of the file.

    Args:
        model, batch, arguments: passed to :func:`trace_model`.
        file: path or URL of the file.
        input_names, output_names: names in the file; None uses torch's defaults.
        opset_version: version of ONNX's operators; None uses torch's default.
        verbose: let torch print the steps of the export.
    Raises:
        ImportError: the packages of the extra "onnx" are missing.
    """
    needed("onnxscript", by="onnx_export")  # torch's exporter needs it only after tracing
    program = trace_model(model, batch, **arguments)
    with _new(file) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised by torch about its own exporter
        torch.onnx.export(
            program, (), temporary, input_names=input_names, output_names=output_names, opset_version=opset_version,
            dynamo=True, external_data=False, verbose=verbose,
        )  # fmt: skip
    return name_of(file)


def quantize_onnx(source: str | Path, file: str | Path) -> Path:
    """Quantize an ONNX model to 8-bit weights, with activations quantized at run time; return the path of the file.

    This uses ``onnxruntime.quantization.quantize_dynamic``, which does not need data; torch's quantization in
    ``torch.ao`` is deprecated. Weights are unsigned, because sums of signed ones overflow on CPUs with AVX2 but without
    VNNI.

    Args:
        source: path or URL of the ONNX model.
        file: path or URL of the file to write; its folder is created.
    Raises:
        ImportError: the packages of the extra "onnx" are missing.
    """
    onnx, quantization = needed("onnx", by="quantize_onnx"), needed("onnxruntime.quantization", by="quantize_onnx")
    model = onnx.load(readable(source))
    del model.graph.value_info[:]  # shapes of weights, which the quantizer transposes and then rejects
    with _new(file) as temporary:
        quantization.quantize_dynamic(model, temporary, weight_type=quantization.QuantType.QUInt8)
    return name_of(file)


def needed(package: str, *, by: str) -> Any:
    """Import a package of the extra "onnx".

    Raises:
        ImportError: the package is missing; the message contains the install command.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(f"{by} needs {package.split('.')[0]}: pip install 'runnerkit[onnx]'") from None


@contextmanager
def _new(file: str | Path) -> Iterator[Path]:
    """Provide a temporary file, which gets the path or URL `file` if the body succeeds."""
    with written(file) as path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with AtomicFile(path) as temporary:
            yield temporary


def _example(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return torch.cat([tensor, tensor]) if tensor.ndim and len(tensor) == 1 else tensor  # torch.export fixes a size of 1
