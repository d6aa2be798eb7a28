"""Export of a trained run to formats that need none of its code: ONNX, ``torch.export``, a folder for Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import nn

from runnerkit.checkpoints.pretrained_export import export_pretrained
from runnerkit.checkpoints.weights import load_weights
from runnerkit.commands.config import Config, read_config
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
    if not isinstance(runner, SupervisedRunner):
        raise config.refused("runner", "must be a SupervisedRunner")
    load_weights(model, source, which=which)
    keys = config.values.get("loaders") or {}
    loader = next((key for key in keys if not key.startswith("train")), None)
    if loader is None:
        raise config.refused(
            "loaders", f"expected an evaluation loader, got {sorted(keys)}; a batch of it provides the model's inputs"
        )
    batch = next(iter(config.make(f"loaders.{loader}")))
    try:
        inputs = runner.inputs_of(batch, model)
    except (KeyError, TypeError) as error:
        raise config.refused("runner", str(error)) from error
    if to == "torch-export":
        return save_program(model, inputs, out)
    names = ["features"] if len(inputs) == 1 else [f"features{number}" for number in range(len(inputs))]
    return onnx_export(model, inputs, out, input_names=names)


def export_hf(run_config: Path, source: Path, out: Path, *, which: Literal["best", "last"], **options: Any) -> Path:
    """Export weights to a folder for ``from_pretrained``, by default with the config of the model in `run_config`.

    Args:
        run_config: the config of the run, which need not exist.
        options: of :func:`export_pretrained`.
    Raises:
        as :func:`export_pretrained`.
    """
    if "config" not in options and run_config.is_file():
        model = read_config(run_config).make("model")
        options["config"] = model.get(options.get("key")) if isinstance(model, dict) else model
    return export_pretrained(source, out, which=which, **options)
