"""Part a: a gradient scaler skips the same steps as in a hand-written loop, and lowers and raises the same scale."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.on_gpu.check import Check, Failed, Figures, Setting, exact_arithmetic
from benchmarks.on_gpu.compare import require_close, require_equal, weights
from benchmarks.on_gpu.parity import EXACT_ON_GPU, GLOBAL_BATCH, images, make_model, make_optimizer
from runnerkit import dl

NUM_EPOCHS, DECAY = 5, 0.95
# The first gradients overflow; after 4 finite steps in a row the scale doubles until they overflow again.
SCALER: dict[str, Any] = {"init_scale": 2.0**22, "growth_interval": 4}


def batches() -> list[Any]:
    """Return the batches of all epochs as one list, so that one epoch counts all skipped steps."""
    return NUM_EPOCHS * list(DataLoader(images(), batch_size=GLOBAL_BATCH))


def by_hand(setting: Setting, *, max_norm: float | None) -> tuple[nn.Module, Figures]:
    """Train with a hand-written loop whose scheduler advances after steps that were not skipped."""
    device = setting.device
    model = make_model().to(device)
    optimizer, scaler = make_optimizer(model), torch.amp.GradScaler(device.type, **SCALER)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    num_skipped = 0
    for pixels, targets in batches():
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(pixels.to(device)), targets.to(device))
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < scale:
            num_skipped += 1
        else:
            scheduler.step()
    return model, {"skipped": num_skipped, "scale": scaler.get_scale(), "lr": optimizer.param_groups[0]["lr"]}


def with_runnerkit(setting: Setting, *, max_norm: float | None) -> tuple[nn.Module, Figures]:
    """Train the same with an engine."""
    model = make_model()
    optimizer = make_optimizer(model)
    precision = dl.AMP(torch.float16, scaler=SCALER)
    clip: Any = {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": max_norm}} if max_norm else {}
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY),
        loaders={"train": batches()},
        callbacks={
            "schedule": dl.SchedulerCallback(interval="step"),
            "optimizer": dl.OptimizerCallback("loss", **clip),
        },
        engine=dl.DeviceEngine(setting.device, precision=precision),
        loggers={"console": None},
    )
    num_skipped = int(runner.epoch_metrics["train"]["skipped_steps"])
    scale = precision.state_dict()["scaler"]["scale"]
    return model, {"skipped": num_skipped, "scale": scale, "lr": optimizer.param_groups[0]["lr"]}


def compare(setting: Setting, *, max_norm: float | None = None) -> Figures:
    """Compare skipped steps, scale, learning rate and weights."""
    with exact_arithmetic():
        model, ours = with_runnerkit(setting, max_norm=max_norm)
        reference, theirs = by_hand(setting, max_norm=max_norm)
    if not 1 < theirs["skipped"] < len(batches()) / 2:
        raise Failed(f"{theirs['skipped']} of {len(batches())} steps were skipped, so nothing is compared", theirs)
    figures = require_equal(ours, theirs)
    tolerance = EXACT_ON_GPU if setting.is_gpu else 0.0
    return {
        **figures,
        **require_close(weights(model), weights(reference), tolerance=tolerance, start=weights(make_model())),
    }


CHECKS = (
    Check("fp16, skipped steps", compare),
    Check("fp16, skipped steps, clipped gradients", lambda setting: compare(setting, max_norm=0.5)),
)
