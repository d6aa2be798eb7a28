"""Part d: peak memory of FSDP2's options and of recomputed activations, beside hand-written loops that do the same."""

import gc
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.on_gpu import work
from benchmarks.on_gpu.check import Check, Failed, Figures, Setting
from benchmarks.on_gpu.compare import require_close, weights
from benchmarks.on_gpu.work import Block
from runnerkit import dl
from runnerkit.engine import IEngine

NUM_STEPS = 4
MOST = 1.1  # ratio of the peak to that of the hand-written loop
TOLERANCE = 3e-3  # AdamW divides by small second moments, which magnifies the rounding of bf16
LR = 1e-2
Peak = float


class PeakMemory(dl.Callback):
    """A callback that logs the peak of GPU memory in MiB, in the process that trains."""

    def on_loader_start(self, runner: Any) -> None:
        if runner.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(runner.engine.device)

    def on_loader_end(self, runner: Any) -> None:
        runner.loader_metrics["peak_mib"] = peak_mib(runner.engine.device)


def peak_mib(device: torch.device) -> Peak:
    """Return the peak of GPU memory since it was reset, in MiB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4)


def with_runnerkit(engine: IEngine, setting: Setting, **options: Any) -> tuple[Tensor, Peak]:
    """Train transformer blocks; return the weights and the peak of rank zero."""
    _release()
    model = work.transformer(setting, **options).make_model()
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=make_optimizer(model),
        loaders={"train": NUM_STEPS * [work.tokens(setting)]},
        callbacks={"peak": PeakMemory(order=dl.CallbackOrder.External)},
        engine=engine,
        loggers={"console": None},
    )
    return weights(model), runner.epoch_metrics["train"]["peak_mib"]


def train_by_hand(model: nn.Module, setting: Setting, *, dtype: torch.dtype | None) -> Peak:
    """Train a model that is on its device, or sharded; return the peak.

    Args:
        dtype: autocast's dtype; None does not cast.
    """
    optimizer, device = make_optimizer(model), setting.device
    inputs, targets = (each.to(device) for each in work.tokens(setting))
    if setting.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    model.train()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.float() if dtype is None else logits, targets)
        loss.backward()
        optimizer.step()
    return peak_mib(device)


@dataclass(frozen=True)
class Options:
    """Options of FSDP2 for the engine; the hand-written loop reads the same ones."""

    engine: dict[str, Any] = field(default_factory=dict)

    def shard(self, model: nn.Module, setting: Setting) -> None:
        """Apply ``fully_shard`` to the model as the engine does."""
        arguments: dict[str, Any] = {
            "mesh": init_device_mesh(setting.device_type, (1,)),
            "reshard_after_forward": self.engine.get("reshard_after_forward", True),
        }
        if dtype := self.engine.get("compute_dtype"):
            arguments["mp_policy"] = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
        if self.engine.get("cpu_offload"):
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=setting.is_gpu)
        for module in model.modules():
            if isinstance(module, tuple(self.engine.get("shard_modules", ()))):
                fully_shard(module, **arguments)
        fully_shard(model, **arguments)


def fsdp(options: Options, setting: Setting) -> Figures:
    """Compare one sharded process with a hand-written FSDP2 loop."""
    engine = dl.FullyShardedDataParallelEngine(1, device=setting.device_type, **options.engine)
    ours, peak = with_runnerkit(engine, setting)
    backend = "cpu:gloo,cuda:nccl" if setting.is_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = work.transformer(setting).make_model()
        start = weights(model)
        if not options.engine.get("cpu_offload"):
            model.to(setting.device)
        options.shard(model, setting)
        their_peak = train_by_hand(model, setting, dtype=None)
        theirs = torch.cat([_whole(each).cpu().double().flatten() for each in model.state_dict().values()])
    finally:
        dist.destroy_process_group()
    figures = require_close(ours, theirs, tolerance=TOLERANCE, start=start)
    return {**figures, **compare_peaks(peak, their_peak, setting)}


def _whole(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value  # the shard of the only process


def recomputed(setting: Setting) -> Figures:
    """Compare recomputed activations with kept ones, and with a hand-written loop that recomputes them."""
    make_engine = partial(dl.AMPEngine, setting.device, dtype=torch.bfloat16)
    ours, peak = with_runnerkit(make_engine(), setting, recomputes=True)
    kept, kept_peak = with_runnerkit(make_engine(), setting)
    _release()
    model = work.transformer(setting, recomputes=True).make_model()
    start = weights(model)
    model.to(setting.device)
    their_peak = train_by_hand(model, setting, dtype=torch.bfloat16)
    figures = require_close(ours, weights(model), tolerance=TOLERANCE, start=start)
    require_close(ours, kept, tolerance=TOLERANCE, start=start)
    figures |= compare_peaks(peak, their_peak, setting)
    if setting.is_gpu:
        figures["ratio to kept activations"] = peak / kept_peak
        if not peak < kept_peak:
            raise Failed(f"recomputed activations take {peak:.0f} MiB, kept ones {kept_peak:.0f}", figures)
    return figures


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare_peaks(ours: Peak, theirs: Peak, setting: Setting) -> Figures:
    """Return both peaks and their ratio; nothing on a CPU, whose allocator does not count.

    Raises:
        Failed: ours is more than a tenth larger.
    """
    if not setting.is_gpu:
        return {"peak memory": "needs CUDA"}
    figures: Figures = {"raw, MiB": theirs, "runnerkit, MiB": ours, "ratio": ours / theirs}
    if not ours <= MOST * theirs:
        raise Failed(f"the peak is {ours:.0f} MiB, that of the hand-written loop {theirs:.0f}", figures)
    return figures


BY_BLOCK: dict[str, Any] = {"shard_modules": [Block]}
FSDP_OPTIONS = {
    "FSDP2, one unit": {},
    "FSDP2, a unit per block": BY_BLOCK,
    "FSDP2, weights kept after forward": {**BY_BLOCK, "reshard_after_forward": False},
    "FSDP2, compute_dtype=bf16": {**BY_BLOCK, "compute_dtype": torch.bfloat16},
    "FSDP2, shards on the host": {**BY_BLOCK, "cpu_offload": True},
}

CHECKS = (
    Check("recomputed activations", recomputed),
    *(Check(name, partial(fsdp, Options(options)), limit_s=120) for name, options in FSDP_OPTIONS.items()),
)
