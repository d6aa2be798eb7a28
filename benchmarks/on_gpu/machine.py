"""Part 0: the device computes, and what the report says about the machine."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from benchmarks.on_gpu.check import Check, Failed, Figures, Setting

PACKAGES = (
    "torch", "torchvision", "triton", "numpy", "lightning", "accelerate", "transformers", "torchmetrics", "tensorboard",
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def describe_host() -> Figures:
    """Describe the host and the installed packages without touching CUDA."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": _printed("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown",
    }


def describe_device(setting: Setting) -> Figures:
    """Compute on the device; return its name, number, memory, driver and CUDA versions."""
    product = (torch.ones(64, 64, device=setting.device) @ torch.ones(64, 64, device=setting.device)).sum().item()
    if product != 64**3:
        raise Failed(f"the device computed {product} instead of {64**3}")
    if not setting.is_gpu:
        return {
            "device": f"CPU, {platform.processor() or platform.machine()}",
            "dry run": "tiny sizes; two processes over gloo instead of nccl, ResNet-18 instead of ResNet-50, "
            "compiled by aot_eager; times mean nothing",
        }
    gpu = torch.cuda.get_device_properties(0)
    driver = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "device": f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB",
        "capability": f"{gpu.major}.{gpu.minor}",
        "driver": driver[0] if driver else "unknown",
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
    }


def _printed(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


CHECKS = (Check("the device computes", describe_device, limit_s=120),)
