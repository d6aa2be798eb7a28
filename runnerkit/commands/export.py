"""A trained run as a file that needs no code of it: ONNX, torch.export's program, or safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import nn

from runnerkit.commands.config import Config
from runnerkit.storage.weights import load_weights
from runnerkit.supervised import SupervisedRunner
from runnerkit.tracing import onnx_export, save_program

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
    named = runner._named(next(iter(config.make(f"loaders.{loader}"))))
    inputs = tuple(named[key] for key in runner._input_names)
    if to == "torch-export":
        return save_program(model, inputs, out)
    names = ["features"] if len(inputs) == 1 else [f"features{number}" for number in range(len(inputs))]
    return onnx_export(model, inputs, out, input_names=names)
