"""Functions that complement the runner, in one namespace: ``from runnerkit import utils``."""

from __future__ import annotations

from runnerkit.checkpoints.averages import average_weights, get_averaged_weights_by_path_mask
from runnerkit.checkpoints.file import load_checkpoint, save_checkpoint
from runnerkit.checkpoints.folder import export_full_state
from runnerkit.checkpoints.pretrained_export import export_pretrained
from runnerkit.checkpoints.weights import export_safetensors
from runnerkit.engines.choose import get_available_engine
from runnerkit.engines.process_environment import get_rank
from runnerkit.loop.environment import describe_environment
from runnerkit.models.layer_table import summarize
from runnerkit.models.magnitude_pruning import prune_model
from runnerkit.models.parameters import get_nn_from_ddp_module, set_requires_grad, soft_update
from runnerkit.models.quantization import quantize_model
from runnerkit.models.tracing import onnx_export, quantize_onnx, trace_model
from runnerkit.seeding.generators import set_global_seed
from runnerkit.seeding.initialization import initialize_parameters, parameters_on_meta
from runnerkit.support.accelerator import get_device

__all__ = [
    "average_weights",
    "describe_environment",
    "export_full_state",
    "export_pretrained",
    "export_safetensors",
    "get_available_engine",
    "get_averaged_weights_by_path_mask",
    "get_device",
    "get_nn_from_ddp_module",
    "get_rank",
    "initialize_parameters",
    "load_checkpoint",
    "onnx_export",
    "parameters_on_meta",
    "prune_model",
    "quantize_model",
    "quantize_onnx",
    "save_checkpoint",
    "set_global_seed",
    "set_requires_grad",
    "soft_update",
    "summarize",
    "trace_model",
]
