"""A trained run as a file that needs no code of it: ONNX, torch.export's program, or safetensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runnerkit.atomic_file import AtomicFile
from runnerkit.config import Config
from runnerkit.supervised import SupervisedRunner
from runnerkit.weights import load_weights

Format = Literal["onnx", "torch-export"]
SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors"}


def export_configured(config: Config, source: Path, out: Path, *, to: Format, which: Literal["best", "last"]) -> Path:
    """Export a config's model with the weights of `source`, for batches of any length.

    What it is called with is looked up in a batch of the config's loaders.

    Raises:
        ValueError: the config has several models or none, no loader, or a runner that is not supervised.
        FileNotFoundError: there are no weights.
    """
    runner, model = config.make("runner") or SupervisedRunner(), config.make("model")
    if not isinstance(model, nn.Module):
        raise config.refused("model", f"is a {type(model).__name__}; expected one model")
    if not isinstance(runner, SupervisedRunner) or isinstance(runner.input_key, dict):
        raise config.refused("runner", "must be a SupervisedRunner whose input_key is a name or a list of names")
    load_weights(model, source, which=which)
    keys = config.values.get("loaders") or {}
    loader = next((key for key in keys if not key.startswith("train")), None)
    if loader is None:
        raise config.refused(
            "loaders", f"none of {sorted(keys)} evaluates; a batch of one that does shows what the model is called with"
        )
    batch = next(iter(config.make(f"loaders.{loader}")))
    named = runner._named(batch)
    return export_model(model, [named[key] for key in runner._input_names], out, to=to)


def export_model(model: nn.Module, inputs: list[Tensor], out: Path, *, to: Format) -> Path:
    """Export `model` as it evaluates, on the CPU, for batches of any length.

    Args:
        inputs: an example of what it is called with, each (N, ...), N >= 2.
    Raises:
        ImportError: ONNX is not installed.
        Exception: torch.export's own; the model does what it cannot follow, such as to branch on a value.
    """
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} for _ in inputs)
    program = torch.export.export(model.cpu().eval(), tuple(inputs), dynamic_shapes=shapes)
    out.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFile(out) as temporary:
        if to == "onnx":
            _save_onnx(program, temporary, num_inputs=len(inputs))
        else:
            with temporary.open("wb") as file:
                torch.export.save(program, file)
    return out


def _save_onnx(program: Any, path: Path, *, num_inputs: int) -> None:
    try:
        import onnx  # noqa: F401  # torch asks for both half-way
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError("ONNX needs the packages onnx and onnxscript: pip install 'runnerkit[onnx]'") from None
    names = ["features"] if num_inputs == 1 else [f"features{number}" for number in range(num_inputs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of what its exporter still uses
        torch.onnx.export(program, (), path, input_names=names, external_data=False, verbose=False)
