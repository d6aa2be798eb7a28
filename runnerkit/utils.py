"""Functions that complement the runner, in one namespace: ``from runnerkit import utils``."""

from __future__ import annotations

from runnerkit.checkpoints.file import load_checkpoint, save_checkpoint
from runnerkit.checkpoints.folder import export_full_state
from runnerkit.checkpoints.weights import export_safetensors
from runnerkit.engines.choose import get_available_engine
from runnerkit.engines.process_environment import get_rank
from runnerkit.loop.environment import describe_environment, get_device
from runnerkit.models.layer_table import summarize
from runnerkit.models.magnitude_pruning import prune_model
from runnerkit.models.tracing import onnx_export, quantize_onnx, trace_model
from runnerkit.seeding.generators import set_global_seed

__all__ = [
    "describe_environment",
    "export_full_state",
    "export_safetensors",
    "get_available_engine",
    "get_device",
    "get_rank",
    "load_checkpoint",
    "onnx_export",
    "prune_model",
    "quantize_onnx",
    "save_checkpoint",
    "set_global_seed",
    "summarize",
    "trace_model",
]
