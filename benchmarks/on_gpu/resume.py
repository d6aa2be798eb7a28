"""Part a: a run that is interrupted within an epoch and resumed ends with the weights of an uninterrupted run."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.on_gpu.check import Check, Failed, Figures, Setting, exact_arithmetic
from benchmarks.on_gpu.compare import require_close, weights
from benchmarks.on_gpu.parity import DDP, GLOBAL_BATCH, NUM_SAMPLES, images
from runnerkit import dl
from runnerkit.engine import IEngine

NUM_EPOCHS, EVERY_STEPS = 2, 2
STEPS_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH
INTERRUPTED_AT = STEPS_PER_EPOCH + 3  # one step after the last checkpoint
FAST_TOLERANCE = 1e-3  # fast GPU algorithms sum in an order that varies


class Interrupted(Exception):
    """Raised in the middle of the second epoch."""


class Interrupt(dl.Callback):
    """A callback that interrupts training at a step."""

    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.External)

    def on_batch_end(self, runner: Any) -> None:
        if runner.batch_step == INTERRUPTED_AT:
            raise Interrupted


def make_model() -> nn.Sequential:
    """Create a network with batch norm and dropout, whose random draws a resumed run must continue."""
    torch.manual_seed(1)
    convolution = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(8 * 8 * 8, 3))


def train(make_engine: Callable[[], IEngine], logdir: Path, **options: Any) -> Tensor:
    """Train with shuffling, augmentation on the device, a scheduler and workers; return the weights."""
    engine, model = make_engine(), make_model()
    # With the default eps, AdamW would turn the rounding errors of small gradients into whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    augmentation = nn.Sequential(dl.BatchRandomCrop(padding=1), dl.BatchRandomHorizontalFlip())
    callbacks = {
        "augmentation": dl.BatchTransformCallback(augmentation, input_key="features"),
        "checkpoint": dl.CheckpointCallback(logdir, content="runner", every_steps=EVERY_STEPS),
        **options.pop("callbacks", {}),
    }
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS),
        loaders={
            "train": DataLoader(images(), batch_size=GLOBAL_BATCH // engine.num_processes, shuffle=True, num_workers=1)
        },
        callbacks=callbacks,
        num_epochs=NUM_EPOCHS,
        logdir=logdir,
        engine=engine,
        loggers={"console": None, "csv": None, "tensorboard": None},
        **options,
    )
    return weights(model)


def compare(make: Callable[[Setting], IEngine], setting: Setting, *, tolerance: float = 0.0) -> Figures:
    """Compare a resumed run with an uninterrupted one.

    Args:
        tolerance: absolute; 0 requires the same bits.
    """
    make_engine = partial(make, setting)
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        expected = train(make_engine, whole)
        try:
            train(make_engine, broken, callbacks={"interrupt": Interrupt()})
        except Interrupted:
            pass
        else:
            raise Failed(f"the run was not interrupted at step {INTERRUPTED_AT}")
        resumed = train(make_engine, broken, resume="auto")
    return require_close(resumed, expected, tolerance=tolerance, start=weights(make_model()))


def compare_exactly(make: Callable[[Setting], IEngine], setting: Setting) -> Figures:
    """Compare bit for bit, with deterministic algorithms."""
    with exact_arithmetic():
        return compare(make, setting)


def _one(setting: Setting, **options: Any) -> IEngine:
    return dl.DeviceEngine(setting.device, **options)


def _fp16(setting: Setting) -> IEngine:
    return dl.AMPEngine(setting.device, dtype=torch.float16, channels_last=True)


def _ddp(setting: Setting) -> IEngine:
    return DDP(1 if setting.is_gpu else 2, device=setting.device_type)


def _compiled(setting: Setting) -> IEngine:
    return _one(setting, compile=True if setting.is_gpu else {"backend": "aot_eager"})


def compare_ddp(setting: Setting) -> Figures:
    """Compare runs of DDP, whose processes do not inherit the choice of deterministic algorithms."""
    return compare(_ddp, setting, tolerance=FAST_TOLERANCE if setting.is_gpu else 0.0)


def _fast(setting: Setting) -> Figures:
    setting.require_gpu("algorithms of a CPU are deterministic")
    return compare(_one, setting, tolerance=FAST_TOLERANCE)


CHECKS = (
    Check("GPUEngine, the same bits", partial(compare_exactly, _one)),
    Check("AMPEngine fp16, channels_last, the same bits", partial(compare_exactly, _fp16)),
    Check("compile, the same bits", partial(compare_exactly, _compiled), limit_s=150),
    Check("DDP", compare_ddp, limit_s=180),  # starts processes three times
    Check("GPUEngine, the default algorithms", _fast),
)
