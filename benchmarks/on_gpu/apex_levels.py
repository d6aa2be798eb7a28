"""Part c: NVIDIA Apex, release 25.05, O1 and O2, beside a hand-written Apex loop and torch's own mixed precision.

Set the environment variable APEX_SOURCE to the folder that holds the package `apex`; its sources alone are enough, and
without its CUDA extensions it unscales gradients in Python.
"""

import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.on_gpu.check import Check, Figures, Setting, Skipped, exact_arithmetic
from benchmarks.on_gpu.compare import require_close, weights
from benchmarks.on_gpu.parity import EXACT_ON_GPU, GLOBAL_BATCH, images, make_model, make_optimizer
from runnerkit import dl
from runnerkit.engine import IEngine

VARIABLE = "APEX_SOURCE"
NATIVE_TOLERANCE = 5e-3  # Apex and torch choose 16 bits for different functions; O2 keeps 16-bit gradients
NUM_EPOCHS = 4
NUM_WARM = 6
Result = tuple[Any, float]  # weights as an array, and microseconds of a step


class Timed:
    """A loader that repeats prepared batches and measures the steps after the first ones."""

    def __init__(self, setting: Setting) -> None:
        self.batches: list[Any] = NUM_EPOCHS * list(DataLoader(images(), batch_size=GLOBAL_BATCH))
        self.setting = setting
        self.step_us = 0.0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches[:NUM_WARM]
        self.setting.synchronize()
        began = time.perf_counter()
        yield from self.batches[NUM_WARM:]
        self.setting.synchronize()
        self.step_us = 1e6 * (time.perf_counter() - began) / (len(self) - NUM_WARM)


def apex_by_hand(level: str, setting: Setting) -> Result:
    """Train with Apex in a hand-written loop."""
    amp = import_module("apex.amp")
    batches, model = Timed(setting), make_model().to(setting.device)
    optimizer = make_optimizer(model)
    models, optimizers = amp.initialize(
        [model], [optimizer], opt_level=level, verbosity=0, loss_scale=None, num_losses=1
    )
    for pixels, targets in batches:
        optimizers[0].zero_grad()
        loss = nn.functional.cross_entropy(models[0](pixels.to(setting.device)), targets.to(setting.device))
        with amp.scale_loss(loss, optimizers) as scaled:
            scaled.backward()
        optimizers[0].step()
    return _master_weights(models[0], optimizers[0], level), batches.step_us


def _master_weights(model: nn.Module, optimizer: Any, level: str) -> Any:
    """Return the weights in fp32: under O2 the optimizer holds them, in the order of the model's parameters."""
    if level == "O1":
        return weights(model).numpy()
    masters: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
    return torch.cat([each.detach().cpu().double().flatten() for each in masters]).numpy()


def with_engine(make: Callable[[Setting], IEngine], setting: Setting) -> Result:
    """Train the same batches with an engine."""
    batches, model = Timed(setting), make_model()
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=make_optimizer(model),
        loaders={"train": batches},
        engine=make(setting),
        loggers={"console": None},
    )
    return weights(model).numpy(), batches.step_us


def compare(level: str, setting: Setting) -> Figures:
    """Compare APEXEngine with a hand-written Apex loop, and with AMPEngine; each trains in its own process."""
    _require_apex(setting)
    ours, ours_us = _alone(with_engine, partial(_apex, level), setting)
    theirs, theirs_us = _alone(apex_by_hand, level, setting)
    native, native_us = _alone(with_engine, _native, setting)
    start = weights(make_model())
    figures = require_close(ours, theirs, tolerance=EXACT_ON_GPU, start=start)
    of_native = require_close(ours, native, tolerance=NATIVE_TOLERANCE, start=start)
    return {
        "package": "NVIDIA's" if (Path(os.environ[VARIABLE]) / "apex" / "optimizers").is_dir() else "a stand-in",
        **figures,
        "difference from native AMP": of_native["difference"],
        "µs a step": ours_us,
        "ratio to hand-written Apex": ours_us / theirs_us,
        "ratio to native AMP": ours_us / native_us,
    }


def _require_apex(setting: Setting) -> None:
    """Make `apex` importable here and in child processes.

    Raises:
        Skipped: the variable is not set, or this is a CPU and the package is NVIDIA's.
    """
    source = os.environ.get(VARIABLE, "")
    if not source:
        raise Skipped(f"{VARIABLE} is not set: it names the folder that holds Apex's package `apex`, release 25.05")
    if not (Path(source) / "apex" / "amp").is_dir():
        raise Skipped(f"{VARIABLE}={source} lacks the folder apex/amp, which release 25.05 has")
    if not setting.is_gpu and (Path(source) / "apex" / "optimizers").is_dir():
        raise Skipped("needs CUDA: NVIDIA's Apex computes on GPUs only")
    source = str(Path(source).resolve())
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])


def _alone(train: Callable[..., Result], *arguments: Any) -> tuple[Tensor, float]:
    """Call `train` in a forked process: Apex changes functions of torch for the rest of a process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        trained, step_us = pool.submit(_exactly, train, *arguments).result()
    return torch.from_numpy(trained), step_us


def _exactly(train: Callable[..., Result], *arguments: Any) -> Result:
    warnings.simplefilter("ignore")  # Apex says that it is deprecated, and that its extensions are missing
    with exact_arithmetic():
        return train(*arguments)


def _apex(level: str, setting: Setting) -> IEngine:
    return dl.APEXEngine(setting.device, opt_level=level, tf32=False)


def _native(setting: Setting) -> IEngine:
    return dl.AMPEngine(setting.device, dtype=torch.float16, tf32=False)


CHECKS = (
    Check("O1", partial(compare, "O1"), is_timed=True),
    Check("O2", partial(compare, "O2"), is_timed=True),
)
