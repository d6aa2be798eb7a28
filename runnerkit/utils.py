"""Functions beside the runner, under one name: ``from runnerkit import utils``."""

from __future__ import annotations

from runnerkit.engines.choose import get_available_engine
from runnerkit.engines.process_environment import get_rank
from runnerkit.environment import describe_environment, get_device
from runnerkit.model_summary import summarize
from runnerkit.pruning import prune_model
from runnerkit.seeding import set_global_seed
from runnerkit.storage.checkpoint import export_full_state
from runnerkit.storage.checkpoint_file import load_checkpoint, save_checkpoint
from runnerkit.storage.weights import export_safetensors
from runnerkit.tracing import onnx_export, quantize_onnx, trace_model

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
