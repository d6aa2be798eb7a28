"""Export of a trained run to ONNX, a ``torch.export`` program or safetensors, which need none of its code."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import nn

from runnerkit.checkpoints.weights import load_weights
from runnerkit.commands.config import Config
from runnerkit.models.tracing import onnx_export, save_program
from runnerkit.supervised import SupervisedRunner

Format = Literal["onnx", "torch-export"]
SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors"}


def export_configured(config: Config, source: Path, out: Path, *, to: Format, which: Literal["best", "last"]) -> Path:
    """Export a config's model with the weights of `source`, for batches of any length.

    A batch of one of the config's loaders gives the model's inputs.

    Raises:
        ValueError: the config does not have exactly one model and an evaluation loader, or its runner is not a
            `SupervisedRunner`.
        FileNotFoundError: `source` does not contain weights.
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
            "loaders", f"expected an evaluation loader, got {sorted(keys)}; a batch of it provides the model's inputs"
        )
    inputs = runner.inputs_of(next(iter(config.make(f"loaders.{loader}"))))
    if to == "torch-export":
        return save_program(model, inputs, out)
    names = ["features"] if len(inputs) == 1 else [f"features{number}" for number in range(len(inputs))]
    return onnx_export(model, inputs, out, input_names=names)
