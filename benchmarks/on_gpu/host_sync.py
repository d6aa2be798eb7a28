"""Part a: from the second step of a loader to its last, nothing synchronizes the host with the GPU."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.on_gpu.check import Check, Failed, Figures, Setting
from benchmarks.on_gpu.parity import GLOBAL_BATCH, images, make_model, make_optimizer
from runnerkit import dl
from runnerkit.engine import IEngine

NUM_EPOCHS = 2
CLIP: Any = {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": 1.0}}
REASON = "torch.cuda.set_sync_debug_mode; tests/test_no_host_sync.py counts on the CPU"
MESSAGE = "called a synchronizing CUDA operation"


class Watch(dl.Callback):
    """A callback that sets CUDA's sync debug mode between the first and the last step of each loader.

    Args:
        mode: "error" raises at the first synchronization, "warn" counts them; None, for a CPU, only counts the steps.
    """

    def __init__(self, mode: str | None) -> None:
        super().__init__(order=dl.CallbackOrder.External + 1)
        self.mode = mode
        self.num_steps = 0

    def on_batch_end(self, runner: Any) -> None:
        is_watched = runner.loader_batch_step < runner.loader_batch_len
        self.num_steps += is_watched
        if self.mode is not None:
            torch.cuda.set_sync_debug_mode(self.mode if is_watched else "default")


def train(engine: IEngine, watch: Watch, loader: Any) -> None:
    """Train with metrics, clipping, a schedule of steps and an average of the weights."""
    model = make_model()
    optimizer = make_optimizer(model)
    try:
        dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100),
            loaders={"train": loader, "valid": loader},
            callbacks={
                "optimizer": dl.OptimizerCallback("loss", **CLIP),
                "accuracy": dl.AccuracyCallback("logits", "targets"),
                "schedule": dl.SchedulerCallback(interval="step"),
                "average": dl.EMACallback(),
                "watch": watch,
            },
            num_epochs=NUM_EPOCHS,
            engine=engine,
            loggers={"console": None},
        )
    finally:
        if watch.mode is not None:
            torch.cuda.set_sync_debug_mode("default")


def plain_loader(setting: Setting) -> Any:
    return DataLoader(images(), batch_size=GLOBAL_BATCH, shuffle=True, pin_memory=setting.is_gpu)


def require_none(
    make: Callable[[Setting], IEngine], make_loader: Callable[[Setting], Any], setting: Setting
) -> Figures:
    """Train with the mode "error", which raises at the first synchronization; on a CPU, only train."""
    if setting.is_gpu:
        _require_detection()
    watch = Watch("error" if setting.is_gpu else None)
    train(make(setting), watch, make_loader(setting))
    setting.require_gpu(REASON)
    return {"steps": watch.num_steps, "synchronizations": 0}


def _require_detection() -> None:
    """Check that a deliberate synchronization raises."""
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        value.item()
    except RuntimeError:
        return
    finally:
        torch.cuda.set_sync_debug_mode("default")
    raise Failed("set_sync_debug_mode('error') did not notice .item()")


def count_of_fp16(setting: Setting) -> Figures:
    """Count the synchronizations of a gradient scaler, which reads once per training step if gradients are finite."""
    watch = Watch("warn" if setting.is_gpu else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(dl.AMPEngine(setting.device, dtype=torch.float16), watch, plain_loader(setting))
    setting.require_gpu(REASON)
    num_syncs = sum(MESSAGE in str(each.message) for each in caught)
    figures: Figures = {"steps": watch.num_steps, "synchronizations": num_syncs}
    if num_syncs > watch.num_steps // 2:  # half of the steps train
        raise Failed(
            f"{num_syncs} synchronizations in {watch.num_steps // 2} training steps, expected one each", figures
        )
    return figures


def _one(setting: Setting) -> IEngine:
    return dl.DeviceEngine(setting.device)


def _bf16(setting: Setting, **options: Any) -> IEngine:
    return dl.AMPEngine(setting.device, dtype=torch.bfloat16, **options)


def _compiled(setting: Setting) -> IEngine:
    return dl.DeviceEngine(setting.device, compile=True if setting.is_gpu else {"backend": "aot_eager"})


def _prefetched(setting: Setting) -> Any:
    return dl.BatchPrefetchLoaderWrapper(plain_loader(setting))


def _tensor_loader(setting: Setting) -> Any:
    return dl.TensorLoader(*images().tensors, batch_size=GLOBAL_BATCH, shuffle=True, device=setting.device)


CHECKS = (
    Check("GPUEngine", partial(require_none, _one, plain_loader)),
    Check("AMPEngine bf16", partial(require_none, _bf16, plain_loader)),
    Check(
        "AMPEngine bf16, channels_last, prefetched",
        partial(require_none, partial(_bf16, channels_last=True), _prefetched),
    ),
    Check("TensorLoader on the device", partial(require_none, _one, _tensor_loader)),
    Check("compile", partial(require_none, _compiled, plain_loader), limit_s=150),
    Check("AMPEngine fp16, one per training step", count_of_fp16),
)
